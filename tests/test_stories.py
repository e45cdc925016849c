"""The stories of the documentation: their commands find what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.launchers.nodes import why_none
from tools.stories import DOCS, ROOT, STORIES, StoryError, told

SLOW_LINK = r"link (from rank 3 on node3 to rank 2 on node2|between rank 2 on node2 and rank 3 on node3), communication"
"""With its direction, unless noise makes the messages of the other one slow as well."""

PAGE = """# Title

```console
$ echo first
$ printf 'a\\nb  \\nc\\nd\\n'
```

<!-- output{which} -->
```text
old
```

Words.
"""


@pytest.mark.parametrize(
    ("which", "shown"),
    [("", "a\nb\nc\nd"), (": 2 lines", "a\nb"), (': "b" to "d"', "b\nc"), (': to "c"', "a\nb")],
)
def test_what_the_last_command_prints_takes_the_place_of_the_old_text(which: str, shown: str, tmp_path: Path) -> None:
    page = PAGE.format(which=which)

    assert told(page, tmp_path) == page.replace("old", shown)


def test_a_block_without_an_output_is_run_and_stays(tmp_path: Path) -> None:
    page = "```console\n$ touch made\n```\n\n```text\nnot an output\n```\n"

    assert told(page, tmp_path) == page
    assert (tmp_path / "made").exists()


def test_a_command_that_fails_ends_the_story(tmp_path: Path) -> None:
    with pytest.raises(StoryError, match="exits with 1"):
        told("```console\n$ false\n```\n", tmp_path)
    with pytest.raises(StoryError, match="no line begins"):
        told(PAGE.format(which=': to "e"'), tmp_path)


def test_a_job_in_the_background_ends_with_its_page(tmp_path: Path) -> None:
    page = (
        "<!-- background -->\n```console\n$ sh -c 'sleep 1; echo there > said; echo $$ > pid; sleep 600'\n```\n\n"
        "<!-- until: there -->\n```console\n$ sh -c 'cat said || echo not yet'\n```\n\n<!-- output -->\n```text\n```\n"
    )

    assert "```text\nthere\n```" in told(page, tmp_path)
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.mark.parametrize("name", STORIES)
def test_a_page_shows_outputs_and_a_picture_that_are_there(name: str) -> None:
    page = (DOCS / f"{name}.md").read_text()
    shown = re.findall(r"^<!-- output.* -->\n```text\n(.*?)```", page, re.MULTILINE | re.DOTALL)

    assert shown
    assert all(text.strip() for text in shown)
    assert f"](images/{name}.png)" in page
    assert (DOCS / "images" / f"{name}.png").exists()


@pytest.mark.thorough
@pytest.mark.e2e
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("slow-rank", [r"1\. rank 2 on ", "Faster: "]),
        ("slow-link", [SLOW_LINK, "Faster: "]),
        ("bubble", ["1f1b, 4 stages, 4 microbatches", "Faster: "]),
        ("hang", ["Root: rank 2", r"hang\.py:58 wait_for", "Nothing hangs or failed"]),
    ],
)
def test_a_story_is_true(name: str, facts: list[str], tmp_path: Path) -> None:
    if name == "slow-link" and (reason := why_none()):
        pytest.skip(reason)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    page = (DOCS / f"{name}.md").read_text()
    outputs = re.findall(r"^```text\n(.*?)^```", told(page, tmp_path), re.MULTILINE | re.DOTALL)
    printed = " ".join("\n".join(outputs).split())

    assert [fact for fact in facts if not re.search(fact, printed)] == [], printed
