"""The reference pages of the documentation that follow from the code: docs/cli.md and docs/json.md.

``python -m tools.reference docs`` writes them; a test compares them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import typer

from commtrace.cli.main import COMMANDS, load_command

_WRITTEN_BY: Final = "<!-- Written by `python -m tools.reference docs`. -->"


def command_page() -> str:
    """Return docs/cli.md: the help of every command."""
    parts = [
        "# Commands",
        _WRITTEN_BY,
        "`commtrace COMMAND --help` prints the same. Exit codes are in [Troubleshooting](troubleshooting.md).",
    ]
    for name in COMMANDS:
        command = load_command(name)
        context = typer.Context(
            command,
            info_name=f"commtrace {name}",
            terminal_width=100,
            max_content_width=100,
            **command.context_settings,
        )
        parts += [f"## {name}", f"```text\n{command.get_help(context).rstrip()}\n```"]
    return "\n\n".join(parts) + "\n"


def json_page(schemas: Path) -> str:
    """Return docs/json.md: every field of the JSON outputs, from the files NAME.schema.json in ``schemas``."""
    parts = [
        "# JSON outputs",
        _WRITTEN_BY,
        "Times are in nanoseconds where a name ends in `_ns`. Fields may be added in later versions: ignore those that "
        "you do not know. The schemas themselves (JSON Schema 2020-12) are beside this page, in the folder `json`.",
    ]
    for path in sorted(schemas.glob("*.schema.json")):
        schema = json.loads(path.read_text())
        parts.append(f"## {schema['title']}")
        parts.append(f"Schema: [{path.name}](json/{path.name}). {schema.get('description', '')}".rstrip())
        definitions = schema.get("$defs", {})
        tables = [("", schema), *((f"### {name}", definition) for name, definition in definitions.items())]
        for title, table in tables:
            rows = list(_rows(table))
            if rows:
                parts += [title] if title else []
                parts.append("\n".join(("| Field | Type | |", "|---|---|---|", *rows)))
    return "\n\n".join(parts) + "\n"


def _rows(schema: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield a table row for each field, followed by those of inner objects and lists."""
    for name, field in schema.get("properties", {}).items():
        described = field.get("description", "").replace("|", "\\|").replace("\n", " ")
        yield f"| `{prefix}{name}` | {_type(field)} | {described} |"
        yield from _rows(field, f"{prefix}{name}.")
        yield from _rows(field.get("items", {}), f"{prefix}{name}[].")
        if isinstance(field.get("additionalProperties"), dict):
            yield from _rows(field["additionalProperties"], f"{prefix}{name}.KEY.")


def _type(field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return f"`{field['$ref'].rpartition('/')[2]}`"
    if "enum" in field:
        return ", ".join(f"`{json.dumps(value)}`" for value in field["enum"])
    if "const" in field:
        return f"`{json.dumps(field['const'])}`"
    for choice in ("anyOf", "oneOf"):
        if choice in field:
            return " or ".join(_type(option) for option in field[choice])
    types = field.get("type", "any")
    words = [types] if isinstance(types, str) else types
    if "items" in field and "properties" not in field["items"]:
        words = [f"array of {_type(field['items'])}" if word == "array" else word for word in words]
    return " or ".join(words)


def main() -> None:
    """Write the pages into the folder that is the argument."""
    folder = Path(sys.argv[1])
    (folder / "cli.md").write_text(command_page())
    (folder / "json.md").write_text(json_page(folder / "json"))


if __name__ == "__main__":
    main()
