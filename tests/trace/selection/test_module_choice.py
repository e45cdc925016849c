from __future__ import annotations

import pytest

from commtrace.errors import ConfigurationError
from commtrace.trace.selection.module_choice import ModuleChoice

NAMES = {
    "GPT": 0,
    "embedding": 1,
    "decoder.layers.3": 2,
    "decoder.layers.3.self_attention": 3,
    "decoder.layers.3.self_attention.linear_qkv": 4,
    "layers": 1,
}


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ("depth=0", ["GPT"]),
        (" depth=2", ["GPT", "embedding", "decoder.layers.3", "layers"]),
        ("layers.*", ["decoder.layers.3"]),
        ("layers.**", [name for name in NAMES if "layers." in name]),
        ("*.self_attention, embedding", ["embedding", "decoder.layers.3.self_attention"]),
        ("linear_q?v", ["decoder.layers.3.self_attention.linear_qkv"]),
        ("self", []),
        (r"re:decoder\.layers\.\d+", ["decoder.layers.3"]),
    ],
)
def test_the_forms_that_users_write(text: str, taken: list[str]) -> None:
    choice = ModuleChoice.parse(text)

    assert [name for name, depth in NAMES.items() if choice.takes(name, depth)] == taken


@pytest.mark.parametrize("text", ["depth=", "depth=-1", "a..b", ",", "re:("])
def test_what_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="modules"):
        ModuleChoice.parse(text)
