"""Rules of the house that a reader would otherwise have to check by hand."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import syncstack
from syncstack import errors

PACKAGE = Path(syncstack.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Top-level names of everything that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_the_public_names_are_those_that_can_be_had() -> None:
    assert sorted(syncstack.__all__) == syncstack.__all__
    for name in syncstack.__all__:
        assert getattr(syncstack, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = syncstack.nothing


@pytest.mark.parametrize("part", ["facts", "plan", "wire", "seccomp", "doctor", "cli", "settings"])
def test_parts_that_must_be_quick_import_no_torch(part: str) -> None:
    """In a process of its own, because this one has torch already."""
    code = f"import sys, syncstack.{part}; sys.exit('torch' in sys.modules)"
    if part in ("facts", "plan", "wire", "seccomp", "doctor"):
        for path in sorted((PACKAGE / part).glob("*.py")):
            if path.stem not in ("__init__", "__main__"):
                code = f"import syncstack.{part}.{path.stem}; {code}"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_engines_and_ray_are_imported_only_where_they_belong() -> None:
    for path in MODULES:
        where = path.relative_to(PACKAGE).parts[0]
        if where != "engines":
            assert not imports(path) & {"vllm", "sglang", "transformers"}, path
        if where != "fleet":
            assert "ray" not in imports(path), path


def test_e01_e02_nothing_unpickles() -> None:
    for path in MODULES:
        assert not imports(path) & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, path


def test_only_the_edge_reads_the_environment() -> None:
    """settings.py, the command line, the launcher that passes the environment on to vLLM, and the facts about it."""
    for path in MODULES:
        if path.name in ("settings.py", "cli.py", "launch.py", "collect.py"):
            continue
        text = path.read_text()
        assert "os.environ" not in text, path
        assert "getenv" not in text, path


def test_no_wait_is_measured_by_the_wall_clock() -> None:
    """It jumps, when somebody sets it. These tell when something was; see also tests/process/test_clock.py."""
    tells = {"refit/state.py", "run/recorder.py"}
    reads = re.compile(r"\btime\.time(_ns)?\(|\bdatetime\.(now|utcnow)\(|\bfrom time import")
    for path in MODULES:
        if str(path.relative_to(PACKAGE)) not in tells:
            assert not reads.search(path.read_text()), path


def test_files_and_functions_stay_short() -> None:
    for path in MODULES:
        text = path.read_text()
        assert text.count("\n") <= 320, path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                assert node.end_lineno - node.lineno <= 50, (path, node.name)


def test_the_tree_at_the_top_of_errors_is_the_tree() -> None:
    drawn = errors.__doc__ or ""
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, errors.SyncstackError):
            assert name in drawn
            assert kind.__doc__


def test_an_error_says_everything_in_one_line() -> None:
    error = errors.TransportError(
        "it broke", observed="a", expected="b", consequence="Nothing was sent", next_step="mend it"
    )
    assert str(error) == "it broke (observed: a; expected: b). Nothing was sent. Next: mend it"
    assert (errors.UsageError("x").exit_code, errors.LinkLost("x").exit_code) == (2, 1)
