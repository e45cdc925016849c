"""The layers of the package: who may import whom. Read from the sources, function-level imports included."""

from __future__ import annotations

import ast
import graphlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from commtrace.cli.main import COMMANDS
from commtrace.trace import schema
from commtrace.trace.files.reader import load_run
from tests.interchange.aceso.aceso_files import configuration, small_profile
from tests.trace.rows import mark, row, steps, write_rank

TESTS: Final = Path(__file__).resolve().parent
PACKAGE: Final = TESTS.parent / "commtrace"

BASE: Final = frozenset({"errors", "config", "trace"})

MAY_IMPORT: Final[Mapping[str, frozenset[str]]] = {
    # what everything rests on
    "errors": frozenset(),
    "trace": frozenset({"errors"}),
    "recording": frozenset(),
    "recording.launchers": frozenset(),
    "recording.installation": frozenset({"errors", "recording.launchers"}),
    "recording.options": frozenset({"errors", "trace"}),
    "config": frozenset({"errors", "trace", "recording.launchers", "recording.options"}),
    "_native": frozenset(),
    # in the training process
    "recording.agreement": BASE | {"recording.options"},
    "recording.identity": BASE | {"recording.agreement", "recording.launchers", "recording.options"},
    "recording.process_end": frozenset(),
    "recording.findings_at_end": BASE | {"recording.installation"},
    "recording.recorder": BASE | {"recording.process_end"},
    "recording.compile_safe": frozenset(),
    "capture": BASE
    | {
        "_native",
        "recording.agreement",
        "recording.compile_safe",
        "recording.findings_at_end",
        "recording.identity",
        "recording.installation",
        "recording.launchers",
        "recording.options",
        "recording.process_end",
        "recording.recorder",
    },
    "integrations": BASE | {"capture", "recording.installation", "recording.recorder"},
    "live": BASE | {"analysis", "findings"},
    "live.http": frozenset(),
    "recording.session": BASE
    | {
        "capture",
        "exporters",
        "integrations",
        "live",
        "recording.agreement",
        "recording.installation",
        "recording.process_end",
        "recording.recorder",
    },
    "auto": frozenset({"recording.session"}),
    "_inject": frozenset({"auto"}),
    # what is said of a run, whoever found it
    "findings": frozenset({"trace"}),
    # readers of a recorded run; an exporter is one too when it is called by `commtrace export`
    "analysis": frozenset({"errors", "findings", "trace"}),
    "python": frozenset({"errors", "trace", "analysis", "findings"}),
    "live.top": frozenset({"errors", "trace", "analysis", "findings", "live.http"}),
    "history": frozenset({"errors", "trace", "analysis", "findings"}),
    "synth": frozenset({"errors", "trace"}),
    # before a run
    "planning": frozenset({"errors", "trace", "analysis", "findings"}),
    "planning.search": frozenset({"errors", "trace", "analysis", "findings", "planning"}),
    "benchmarks": BASE | {"analysis", "findings", "recording.identity", "recording.launchers"},
    # the files of other systems: nothing that serves everybody is built on them
    "interchange": frozenset({"errors", "trace", "analysis", "planning", "planning.search"}),
    "exporters": BASE
    | {"analysis", "findings", "live", "live.http", "recording.options", "recording.process_end", "recording.recorder"},
    "viewer": frozenset({"errors", "trace", "analysis", "planning", "interchange", "findings"}),
    "cli": BASE
    | {
        "",
        "_inject",
        "_native",
        "analysis",
        "benchmarks",
        "exporters",
        "findings",
        "history",
        "interchange",
        "live",
        "live.http",
        "live.top",
        "planning",
        "planning.search",
        "python",
        "recording.identity",
        "recording.installation",
        "recording.launchers",
        "synth",
        "viewer",
    },
    # entry points
    "": frozenset({"errors", "config", "python", "recording.installation", "recording.session"}),
    "__main__": frozenset({"cli"}),
}
"""By layer: a module or package below ``commtrace`` with all that is in it and has no line here; "" is ``__init__``."""

WITHOUT_TORCH: Final = (
    "errors", "trace", "config", "recording.options", "recording.launchers",
    "recording.agreement", "recording.identity", "analysis", "findings", "python", "history", "interchange", "synth",
    "planning", "planning.search", "live", "live.http", "live.top", "viewer", "cli", "_native", "", "__main__",
)  # fmt: skip


def _sources() -> dict[str, Path]:
    """Every module of the package by its dotted name, the packages behind symlinks included."""
    below = [path for folder in [PACKAGE, *_folders(PACKAGE)] for path in folder.glob("*.py")]
    return {_dotted(path): path for path in sorted(below)}


def _folders(folder: Path) -> Iterator[Path]:
    for child in folder.iterdir():
        if child.is_dir() and child.name != "__pycache__":
            yield child
            yield from _folders(child)


def _dotted(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES: Final = _sources()


def _imports(module: str) -> set[str]:
    """Modules that ``module`` imports anywhere in its source, absolute and as precise as the source tells."""
    path = SOURCES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parent = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
            base = ".".join(filter(None, [parent, node.module]))
            inner = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in SOURCES else base for name in inner}
    return found


def _layer(module: str) -> str:
    """Return the nearest of ``MAY_IMPORT`` that holds a module; one that has no rule is its room on the first floor."""
    parts = module.split(".")[1:]
    names = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((name for name in names if name in MAY_IMPORT), parts[0] if parts else "")


IMPORTS: Final = {module: _imports(module) for module in SOURCES}


def _own(module: str) -> set[str]:
    return {name for name in IMPORTS[module] if name.split(".")[0] == "commtrace"}


def test_the_packages_behind_symlinks_are_read() -> None:
    assert {"commtrace.integrations", "commtrace.exporters", "commtrace.viewer", "commtrace.trace.files.reader"} <= set(
        SOURCES
    )


def test_every_layer_has_a_rule_and_every_rule_a_layer() -> None:
    assert {_layer(module) for module in SOURCES} == set(MAY_IMPORT)


def test_only_what_users_import_stands_outside_of_a_room() -> None:
    assert {path.stem for path in PACKAGE.glob("*.py")} == {"__init__", "__main__", "auto", "config", "errors"}


def test_imports_point_one_way() -> None:
    wrong = {
        (module, imported)
        for module in SOURCES
        for imported in _own(module)
        if _layer(imported) not in MAY_IMPORT[_layer(module)] | {_layer(module)}
    }

    assert wrong == set()


def test_rooms_of_the_analysis_build_on_one_another_without_circles() -> None:
    rooms = graphlib.TopologicalSorter[str]()
    for module in SOURCES:
        if _layer(module) == "analysis":
            rooms.add(
                _room(module), *({_room(name) for name in _own(module) if _layer(name) == "analysis"} - {_room(module)})
            )

    rooms.prepare()  # raises CycleError


def _room(module: str) -> str:
    """``analysis.replay`` of ``commtrace.analysis.replay.graph``; a module directly in ``analysis`` is its own room."""
    return ".".join(module.split(".")[1:3])


def test_a_laptop_without_torch_can_read_a_run() -> None:
    wrong = {
        (module, imported)
        for module in SOURCES
        for imported in IMPORTS[module]
        if _layer(module) in WITHOUT_TORCH and imported.split(".")[0] in {"torch", "megatron", "deepspeed"}
    }

    assert wrong == set()


def test_layers_do_not_import_each_other_in_a_circle() -> None:
    graph: dict[str, set[str]] = {layer: set() for layer in MAY_IMPORT}
    for module in SOURCES:
        graph[_layer(module)] |= {_layer(imported) for imported in _own(module)} - {_layer(module)}

    graphlib.TopologicalSorter(graph).prepare()


def test_modules_do_not_import_each_other_in_a_circle() -> None:
    graph = {module: {name for name in _own(module) if name != module} for module in SOURCES}

    graphlib.TopologicalSorter(graph).prepare()


def test_a_class_name_stands_once_in_the_package() -> None:
    modules: dict[str, list[str]] = {}
    for module, path in SOURCES.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, []).append(module)

    assert {name: where for name, where in modules.items() if len(where) > 1} == {}


def _in_a_new_interpreter(source: str) -> str:
    completed = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=120)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout


def test_importing_commtrace_alone_imports_nothing_slow() -> None:
    source = (
        "import sys, commtrace; print({'torch', 'numpy', 'pyarrow', 'msgspec', 'rich', 'typer'} & set(sys.modules))"
    )

    assert _in_a_new_interpreter(source) == "set()\n"


def test_a_rank_records_without_the_packages_that_only_readers_and_exporters_need(tmp_path: Path) -> None:
    source = (
        "import sys\n"
        "for name in ('click', 'opentelemetry', 'prometheus_client', 'rich', 'typer'):\n    sys.modules[name] = None\n"
        "import torch.distributed as dist\nimport commtrace, torch\n"
        f"commtrace.start(commtrace.Config(dir={str(tmp_path / 'run')!r}, export='monitor'))\n"
        f"dist.init_process_group('gloo', init_method='file://{tmp_path}/store', rank=0, world_size=1)\n"
        "for step in range(3):\n"
        "    with commtrace.step(step):\n        dist.all_reduce(torch.ones(4))\n"
    )
    _in_a_new_interpreter(source)

    spans = load_run(tmp_path / "run").ranks[0].spans
    assert spans.step[spans.kind == schema.COLLECTIVE].tolist() == [0, 1, 2]


def test_every_reading_module_imports_where_torch_cannot_be_imported() -> None:
    readers = [module for module in SOURCES if _layer(module) in WITHOUT_TORCH and module != "commtrace.__main__"]
    source = (
        "import importlib, sys\n"
        "for name in ('torch', 'megatron', 'deepspeed'):\n    sys.modules[name] = None\n"
        f"for name in {readers}:\n    importlib.import_module(name)\n"
        "print('all imported')"
    )

    assert _in_a_new_interpreter(source) == "all imported\n"


def test_reading_commands_work_where_torch_cannot_be_imported(tmp_path: Path) -> None:
    forward = [row(kind=schema.FORWARD, step=step, start=100 * step + 5, end=100 * step + 50) for step in range(8)]
    for name in ("run", "other"):
        write_rank(tmp_path / name, [*steps(0, 8), *forward])
    model = {"layers": 2, "hidden": 64, "heads": 4, "sequence": 32, "vocabulary": 128}
    (tmp_path / "plan.json").write_text(json.dumps({"model": model}))
    small_profile(tmp_path)
    write_rank(tmp_path / "ended", [*steps(0, 8), *forward, mark("end", {})])
    commands = [
        ["summary", str(tmp_path / "run")],
        ["summary", str(tmp_path / "run"), "--json"],
        ["straggler", str(tmp_path / "run")],
        ["pipeline", str(tmp_path / "run")],
        ["bandwidth", str(tmp_path / "run"), "--by", "size"],
        ["whatif", str(tmp_path / "run")],
        ["sql", str(tmp_path / "run"), "SELECT count(*) FROM spans"],
        ["top", str(tmp_path / "run"), "--once"],
        ["doctor", str(tmp_path / "ended"), "--json"],
        ["compare", str(tmp_path / "run"), str(tmp_path / "other")],
        ["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html")],
        ["export", str(tmp_path / "run"), "-o", str(tmp_path / "trace")],
        ["trigger", str(tmp_path / "run"), "--wait", "0"],
        ["synth", "-o", str(tmp_path / "made"), "--pp", "2", "--num-steps", "2"],
        ["metrics", str(tmp_path / "run"), "-o", str(tmp_path / "path.prom")],
        ["list", str(tmp_path)],
        ["hosts", str(tmp_path)],
        ["merge", str(tmp_path / "run"), "-o", str(tmp_path / "merged")],
        ["plan", str(tmp_path / "plan.json")],
        ["search", str(tmp_path), "--aceso", str(configuration(tmp_path))],
    ]
    source = (
        "import sys\n"
        "for name in ('torch', 'megatron', 'deepspeed'):\n    sys.modules[name] = None\n"
        "from commtrace.cli.main import app\n"
        f"for command in {commands}:\n"
        "    try:\n        app(command)\n"
        "    except SystemExit as end:\n"
        # no rank confirms a request here
        "        assert end.code == (3 if command[0] == 'trigger' else 0), (command, end.code)\n"
    )

    assert {command[0] for command in commands} == set(COMMANDS) - {
        "bench overhead", "bench collectives", "bench matmul", "bench replay", "preflight", "run", "import", "monitor",
        "view", "plot",
    }  # fmt: skip
    _in_a_new_interpreter(source)
    assert (tmp_path / "report.html").stat().st_size > 1_000
    assert (tmp_path / "trace").stat().st_size > 100


def test_no_module_of_tests_imports_another_one() -> None:
    """What several of them need has a module of its own, which says by its name what is in it."""
    wrong = [
        (str(path.relative_to(TESTS.parent)), module)
        for folder in (TESTS, TESTS.parent / "bench")
        for path in sorted(folder.rglob("*.py"))
        for module in _imported_by(path)
        if module.startswith(("tests.", "bench.")) and any(part.startswith("test_") for part in module.split("."))
    ]

    assert wrong == []


def _imported_by(path: Path) -> Iterator[str]:
    """What a source imports, absolute: modules, and names of them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, path
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_named_tuples_have_no_other_base() -> None:
    """Python 3.10 refuses them when the module is imported; later versions, on which tests run, do not."""
    wrong = [
        (module, node.name)
        for module, path in SOURCES.items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and "NamedTuple" in map(ast.unparse, node.bases) and len(node.bases) > 1
    ]

    assert wrong == []
