"""Damages inputs, the same way for the same random numbers: bytes, JSON, columns of Arrow, files of a directory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any, Final

import pyarrow as pa

from commtrace.trace import schema

HOSTILE_WORDS: Final = (
    "", "\x1b[2J\x1b]0;owned\x07", "a\nrank 7: forged", "\u202ereversed", "[/bold]", "[bold red]x[/]", "\x00", "%s%n",
    "<script>alert(1)</script>", "../../etc/passwd", "x" * 20_000, "∞", "²", "null", "\x7f", "\x9b31m",
)  # fmt: skip
HOSTILE_NUMBERS: Final = (
    0, -1, -2, 1, 2**31 - 1, 2**31, -(2**31), 2**62, 2**63 - 1, -(2**63), 2**63, 2**64, 10**30, 1_000_000, 999_999_999,
    10**300,
)  # fmt: skip
HOSTILE_VALUES: Final[tuple[Any, ...]] = (
    *HOSTILE_WORDS, *HOSTILE_NUMBERS, None, True, [], {}, [[]], 1.5, -0.0, 1e308, float("nan"), float("inf"),
    [0, 999_999_999], {"a": {"b": []}}, "\ud800",
)  # fmt: skip
DEEP_JSON: Final = "[" * 20_000 + "]" * 20_000


def damage_bytes(content: bytes, random: Random) -> bytes:
    """Flip, cut, repeat, exchange or insert some of the bytes; never the same content."""
    ways: Sequence[Callable[[bytearray, Random], bytes]] = (
        _flip, _flip, _flip, _cut, _insert, _repeat, _noise, _number, _exchange,
    )  # fmt: skip
    for _ in range(8):
        damaged = random.choice(ways)(bytearray(content), random)
        if damaged != content:
            return damaged
    return content + b"\x00"


def _flip(content: bytearray, random: Random) -> bytes:
    for _ in range(random.choice((1, 1, 1, 2, 8))):
        if content:
            content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    return bytes(content)


def _cut(content: bytearray, random: Random) -> bytes:
    return bytes(content[: random.randrange(len(content) + 1)])


def _insert(content: bytearray, random: Random) -> bytes:
    at = random.randrange(len(content) + 1)
    return bytes(content[:at] + random.randbytes(random.choice((1, 8, 100))) + content[at:])


def _repeat(content: bytearray, random: Random) -> bytes:
    begin, end = sorted(random.randrange(len(content) + 1) for _ in range(2))
    return bytes(content[:end] + content[begin:])


def _noise(content: bytearray, random: Random) -> bytes:
    begin = random.randrange(len(content) + 1)
    length = min(random.choice((4, 16, 64, 1024)), len(content) - begin)
    return bytes(content[:begin] + random.randbytes(length) + content[begin + length :])


def _number(content: bytearray, random: Random) -> bytes:
    """A length, an offset or a count that cannot be, wherever it may be taken for one."""
    size = random.choice((2, 4, 8))
    at = random.randrange(max(1, len(content) - size + 1))
    number = random.choice(HOSTILE_NUMBERS) % (1 << 8 * size)
    content[at : at + size] = number.to_bytes(size, random.choice(("little", "big")))
    return bytes(content)


def _exchange(content: bytearray, random: Random) -> bytes:
    """Two parts of the same length, one in the place of the other."""
    length = min(random.choice((4, 8, 64, 512)), len(content) // 2)
    one, other = (random.randrange(len(content) - length + 1) for _ in range(2))
    first, second = content[one : one + length], content[other : other + length]
    content[one : one + length], content[other : other + length] = second, first
    return bytes(content)


def damage_value(value: Any, random: Random) -> Any:
    """Exchange one place in a plain value for a hostile one; keys may go, come, or be exchanged as well."""
    if isinstance(value, dict) and value and random.random() < 0.85:
        key = random.choice([*value])
        what = random.random()
        if what < 0.1:
            return {name: one for name, one in value.items() if name != key}
        if what < 0.15:
            return {**value, random.choice(HOSTILE_WORDS): random.choice(HOSTILE_VALUES)}
        return {**value, key: damage_value(value[key], random)}
    if isinstance(value, (list, tuple)) and value and random.random() < 0.8:
        place = random.randrange(len(value))
        if random.random() < 0.1:
            return [*value, *value]
        return [damage_value(one, random) if at == place else one for at, one in enumerate(value)]
    return random.choice(HOSTILE_VALUES)


def damage_json(text: str, random: Random) -> str:
    """JSON with another value in one place, or no JSON any more."""
    what = random.random()
    if what < 0.05:
        return DEEP_JSON
    if what < 0.1:
        return damage_bytes(text.encode(), random).decode("utf-8", "replace")
    if what < 0.13:
        return '{"a":1e999,"b":' + "9" * 5_000 + "}"
    return json.dumps(damage_value(json.loads(text), random))


def damage_segment(path: Path, random: Random) -> None:
    """Write a segment again, as valid Arrow: with another header, other details of marks, or other columns."""
    with pa.OSFile(str(path)) as file:
        stream = pa.ipc.open_stream(file)
        columns = stream.schema
        rows = [row for batch in stream for row in batch.to_pylist()]
    metadata = dict(columns.metadata)
    what = random.random()
    if what < 0.25:
        key = random.choice([*metadata, schema.METADATA_KEY, schema.METADATA_KEY, schema.METADATA_KEY])
        text = damage_json(metadata[key].decode(), random)
        metadata[key] = text.encode("utf-8", "surrogatepass")
    elif what < 0.6:
        marks = [row for row in rows if row["detail"]]
        for mark in random.sample(marks, min(len(marks), random.choice((1, 1, 3)))):
            mark["detail"] = _encodable(damage_json(mark["detail"], random))
    elif what < 0.8:
        for _ in range(random.choice((1, 1, 5, 50))):
            _damage_row(random.choice(rows), random)
    elif what < 0.9:
        rows = _exchange_in_columns(rows, random)
    else:
        columns, rows = _other_schema(columns, rows, random)
    table = _table(rows, columns).replace_schema_metadata(metadata)
    if random.random() < 0.1:
        table = _null_among_words(table, random)
    with pa.ipc.new_stream(str(path), table.schema) as out:
        out.write_table(table, max_chunksize=random.choice((7, 100, 100_000)))


def _null_among_words(table: pa.Table, random: Random) -> pa.Table:
    """Put a null among the words that the rows of a column refer to."""
    coded = [at for at, field in enumerate(table.schema) if pa.types.is_dictionary(field.type)]
    at = random.choice(coded)
    field, column = table.schema.field(at), table.column(at).combine_chunks()
    words = column.dictionary.to_pylist()
    words[random.randrange(len(words)) if words else 0 :] = [None]
    indices = pa.array([min(index or 0, len(words) - 1) for index in column.indices.to_pylist()], field.type.index_type)
    column = pa.DictionaryArray.from_arrays(indices, pa.array(words, field.type.value_type))
    return table.set_column(at, field.with_type(column.type), column)


def _damage_row(row: dict[str, Any], random: Random) -> None:
    name = random.choice([*row])
    kind = schema.SCHEMA.field(name).type
    if random.random() < 0.1:
        row[name] = None
    elif pa.types.is_boolean(kind):
        row[name] = not row[name]
    elif pa.types.is_integer(kind):
        most = 2 ** (kind.bit_width - 1)
        fitting = [number for number in HOSTILE_NUMBERS if -most <= number < most]
        near = (row[name] or 0) + random.choice((-1000, -1, 1, 1000))
        row[name] = random.choice([*fitting, max(-most, min(near, most - 1))])
    else:
        row[name] = _encodable(random.choice(HOSTILE_WORDS))


def _exchange_in_columns(rows: list[dict[str, Any]], random: Random) -> list[dict[str, Any]]:
    """Every value one that a recorder writes, but in other rows, in another column, or twice."""
    what = random.randrange(4)
    if what == 0:
        return [*rows, *rows]
    numbers = [field.name for field in schema.SCHEMA if pa.types.is_integer(field.type)]
    name, other = random.sample(numbers, 2)
    if what == 1:
        values = [row[name] for row in rows][::-1]
    elif what == 2:
        values = random.sample([row[name] for row in rows], len(rows))
    else:
        most = 2 ** (schema.SCHEMA.field(name).type.bit_width - 1)
        values = [row[other] if row[other] is None else max(-most, min(row[other], most - 1)) for row in rows]
    return [{**row, name: value} for row, value in zip(rows, values, strict=True)]


def _other_schema(
    columns: pa.Schema, rows: list[dict[str, Any]], random: Random
) -> tuple[pa.Schema, list[dict[str, Any]]]:
    at = random.randrange(len(columns))
    field = columns.field(at)
    what = random.randrange(4)
    if what == 0:
        return columns.remove(at), rows
    if what == 1:
        other = random.choice((pa.float64(), pa.string(), pa.list_(pa.int8()), pa.struct([("a", pa.int8())])))
        rows = [{**row, field.name: None} for row in rows]
        return columns.set(at, pa.field(field.name, other)), rows
    if what == 2:
        return columns.append(pa.field(random.choice(("rack", field.name)), pa.int64())), rows
    return pa.schema([*columns][::-1]), rows


def _table(rows: list[dict[str, Any]], columns: pa.Schema) -> pa.Table:
    arrays = []
    for field in columns:
        values = [row.get(field.name) for row in rows]
        if pa.types.is_dictionary(field.type):
            arrays.append(pa.array(values, pa.string()).dictionary_encode().cast(field.type))
        elif field in schema.SCHEMA:
            arrays.append(pa.array(values, field.type))
        else:
            arrays.append(pa.nulls(len(rows), field.type))
    return pa.Table.from_arrays(arrays, schema=columns)


def _encodable(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def damage_directory(directory: Path, random: Random) -> None:
    """Put what is no file where a file is expected, or exchange, remove, copy and rename files."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    path = random.choice(files)
    what = random.randrange(11)
    if what == 0:
        path.unlink()
        os.mkfifo(path)
    elif what == 1:
        path.unlink()
        path.mkdir()
    elif what == 2:
        path.unlink()
        path.symlink_to(random.choice((path.name, "/dev/zero", "/dev/null", "/etc", "missing")))
    elif what == 3:
        path.write_bytes(b"")
    elif what == 4:
        path.write_bytes(random.choice(files).read_bytes())
    elif what == 5:
        path.unlink()
    elif what == 6:
        path.rename(path.with_name(random.choice(("spans-9999.arrows", "spans-0000.arrows.part", "x", "spans-²."))))
    elif what == 7:
        path.parent.rename(path.parent.with_name(random.choice(("rank-00009", "rank-9", "rank-x", "\x1b[31mrank"))))
    elif what == 8:
        other = random.choice(files)
        one, second = path.read_bytes(), other.read_bytes()
        path.write_bytes(second)
        other.write_bytes(one)
    elif what == 9:
        path.with_name(random.choice(("spans-0001.arrows", "spans-0099.arrows"))).write_bytes(path.read_bytes())
    else:
        os.mkfifo(path.with_name("spans-0007.arrows"))
