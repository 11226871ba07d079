"""Check a profile: does it let through what syncstack and the engines need, and nothing that leads out of a container?

Once for each container runtime, because they read the same file differently.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, Literal

import msgspec

from syncstack.seccomp import libseccomp
from syncstack.seccomp.compile import REACHED, Reader
from syncstack.seccomp.load import ENGINES, Runtime, document, read, resolve
from syncstack.seccomp.needs import DANGERS, NEEDS, Danger, Need
from syncstack.seccomp.profile import Profile, parse, unknown_fields
from syncstack.seccomp.table import ARG_NOTES, EPERM, ROWS

Level = Literal["fail", "warn", "note"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing to know about a profile. ``kind`` is stable; ``calls`` are names, some with what an argument means."""

    level: Level
    kind: str
    calls: tuple[str, ...] = ()
    text: str


class Reading(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as one runtime reads it; for an engine's built-in profile ``runtime`` is that engine."""

    runtime: str
    ok: bool
    findings: tuple[Finding, ...]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """``kernel`` is "" for this machine's; ``libseccomp`` decides which names are known. ``ok``: no reading fails."""

    profile: str
    ok: bool
    caps: tuple[str, ...]
    kernel: str
    libseccomp: str
    readings: tuple[Reading, ...]


def _unmet(reader: Reader, needs: Iterable[Need]) -> Iterator[Finding]:
    """Yield what is needed and refused; needs with one reason and one answer are one finding."""
    groups: dict[tuple[bool, str, str, str], list[str]] = {}
    for need in needs:
        number = libseccomp.number_of(need.name)
        if number is not None and number >= 0 and not need.met(reader):
            answer = " or ".join(sorted(reader.answers(need.name, need.args)))
            groups.setdefault((need.required, answer, need.who, need.without), []).append(need.shown)
    for (required, answer, who, without), calls in groups.items():
        text = f"{answer}. Needed by {who}. Without: {without}"
        yield Finding(level="fail" if required else "note", kind="needed", calls=tuple(calls), text=text)


def _open(reader: Reader) -> tuple[Danger, ...]:
    return tuple(danger for danger in DANGERS if reader.answers(danger.name, danger.args) & REACHED)


def _dangerous(found: Sequence[Danger], kind: str, prefix: str) -> Iterator[Finding]:
    for why in dict.fromkeys(danger.why for danger in found):
        calls = tuple(danger.shown for danger in found if danger.why == why)
        yield Finding(level="fail", kind=kind, calls=calls, text=f"{prefix}: {why}")


def _names(reader: Reader) -> Iterator[Finding]:
    """Yield the names that this libseccomp does not know: newer than it, or misspelt."""
    known = {name for row in ROWS for name in row.names} | set(ARG_NOTES)
    given = {name for rule in reader.profile.syscalls for name in rule.names}
    compiled = reader.compiled
    if compiled.not_denied:
        text = "unknown to this libseccomp, so the refusal is left out: open"
        yield Finding(level="fail", kind="not-denied", calls=compiled.not_denied, text=text)
    newer = tuple(name for name in compiled.skipped if name in known)
    if newer:
        text = f"newer than libseccomp {libseccomp.version()}: answer the default here"
        yield Finding(level="note", kind="newer", calls=newer, text=text)
    for name in (*compiled.not_denied, *compiled.skipped):
        if name not in known:
            close = [match for match in difflib.get_close_matches(name, known, n=1, cutoff=0.8) if match not in given]
            text = f"unknown name{f', misspelt for {close[0]}?' if close else ': newer than this tool, or misspelt'}"
            yield Finding(level="warn" if close else "note", kind="unknown-name", calls=(name,), text=text)


_DROPPED: Final = "containerd reads no includes, excludes, minKernel or archMap"


def _conditions(profile: Profile, reader: Reader, docker: Reader) -> Iterator[Finding]:
    """Yield what containerd's passing over Docker's conditions does."""
    rules = [rule for rule in profile.syscalls if rule.includes or rule.excludes]
    if rules:
        text = f"{_DROPPED}: {len(rules)} conditional rules hold for everybody. Give it a flat profile"
        yield Finding(level="warn", kind="dropped", text=text)
    shut = {danger.shown for danger in _open(reader)} - {danger.shown for danger in _open(docker)}
    opened = [danger for danger in DANGERS if danger.shown in shut]
    yield from _dangerous(opened, "opened", "open to all because a condition is dropped")
    old = tuple(rule.name for rule in profile.syscalls if rule.name)
    if old:
        text = "the old form with name instead of names is not read by containerd: these rules are left out"
        yield Finding(level="warn", kind="old-form", calls=old, text=text)


def _default_errno(profile: Profile, docker: Reader, old: Reader) -> Iterator[Finding]:
    """Yield what Docker before 23.0, which answers EPERM by default whatever the profile says, makes worse."""
    if profile.default_action != "SCMP_ACT_ERRNO" or profile.default_errno_ret == EPERM:
        return
    broken = tuple(need.shown for need in NEEDS if need.required and need.met(docker) and not need.met(old))
    text = "Docker before 23.0 reads no defaultErrnoRet and answers EPERM to what no rule names"
    if broken:
        text += ": these break there. Give them a rule with errnoRet (check with --runtime docker-20.10)"
    yield Finding(level="warn" if broken else "note", kind="default-errno", calls=broken, text=text)


def _form(profile: Profile, data: bytes, runtime: Runtime) -> Iterator[Finding]:
    """Yield what is wrong with the file itself."""
    fields = unknown_fields(data)
    if fields:
        yield Finding(level="warn", kind="unknown-field", text=f"no runtime reads {', '.join(fields)}")
    listed = profile.architectures or (runtime != "containerd" and profile.arch_map)
    if not listed and profile.default_action == "SCMP_ACT_ERRNO":
        text = (
            "no architectures: runc 1.1 leaves out its stub then, and numbers that it does not know answer the default "
            "instead of ENOSYS; 32-bit calls end the process"
        )
        yield Finding(level="warn", kind="no-architectures", text=text)
    if profile.flags:
        text = f"flags ({', '.join(profile.flags)}): Docker before 23.0 drops them, runc 1.1 refuses them"
        yield Finding(level="note", kind="flags", text=text)
    if any(rule.errno and rule.errno_ret is None for rule in profile.syscalls):
        text = "errno by name is read by Podman and CRI-O alone; the others answer EPERM: give errnoRet"
        yield Finding(level="warn", kind="errno-name", text=text)


def _read_as(profile: Profile, data: bytes, runtime: Runtime, caps: Sequence[str], kernel: str) -> Reading:
    def reader_of(which: Runtime) -> Reader:
        return Reader(resolve(profile, caps=caps, kernel=kernel, runtime=which))

    reader, docker = reader_of(runtime), reader_of("docker")
    findings = [*_form(profile, data, runtime), *_names(reader), *_unmet(reader, NEEDS)]
    if runtime == "containerd":
        open_anyway = {danger.shown for danger in _open(docker)}
        findings += _conditions(profile, reader, docker)
    else:
        open_anyway = {danger.shown for danger in DANGERS}
    found = [danger for danger in _open(reader) if danger.shown in open_anyway]
    findings += _dangerous(found, "dangerous", "open")
    if runtime == "docker":
        findings += _default_errno(profile, docker, reader_of("docker-20.10"))
    ordered = sorted(findings, key=lambda finding: ("fail", "warn", "note").index(finding.level))
    return Reading(runtime=runtime, ok=not any(f.level == "fail" for f in findings), findings=tuple(ordered))


def check(name: str, *, caps: Sequence[str], kernel: str = "", runtimes: Sequence[Runtime] = ()) -> Report:
    """Return the report on a profile (a name or a file) in the reading of ``runtimes``; ``ProfileError`` if it is none.

    Without ``runtimes`` it is read as Docker and as containerd do, an engine's built-in profile as that engine does.
    """
    data = document(name)
    if data is None:
        data = read(name)
    profile = parse(data, origin=name, strict=False)
    engine = name.partition("@")[0]
    if not runtimes and engine in ENGINES:
        # Both decide the conditions of their own profile, containerd when it makes it for a container.
        reading = msgspec.structs.replace(_read_as(profile, data, "docker", caps, kernel), runtime=engine)
        readings = [reading]
    else:
        which: Sequence[Runtime] = runtimes or ("docker", "containerd")
        readings = [_read_as(profile, data, runtime, caps, kernel) for runtime in which]
    return Report(
        profile=name,
        ok=all(reading.ok for reading in readings),
        caps=tuple(caps),
        kernel=kernel,
        libseccomp=libseccomp.version(),
        readings=tuple(readings),
    )
