"""How fast a path should be, where it was measured. A trial of the pair itself replaces these."""

from __future__ import annotations

from syncstack.facts import Hello

_MEASURED_ON = "H200"
_UNKNOWN = "nobody measured this path on such a pair; a trial does"


def expected(transport: str, sender: Hello, receiver: Hello) -> tuple[float | None, str]:
    """Bytes per second and what that rests on; None where nothing does."""
    on_gpu = [hello.memory != "host" for hello in (sender, receiver)]
    if not any(on_gpu):
        return None, "between CPUs it is as fast as this machine copies memory; a trial measures it"
    names = [_name(hello) for hello, gpu in zip((sender, receiver), on_gpu, strict=True) if gpu]
    if not all(_MEASURED_ON in name for name in names):
        return None, _UNKNOWN
    same = sender.device == receiver.device
    if transport in ("cuda_fd", "cuda_ipc") and same:
        return 2.1e12, "measured within one H200: 6.2 GB in 2.9 to 3.0 ms"
    if transport == "cuda_fd":
        return 3.7e11, "measured between two H200 over NVLink, by NCCL: 6.2 GB in 16.8 ms"
    if transport == "host_fd":
        return 4.0e10, "measured over PCIe with one H200, both directions at once: 6.2 GB in 0.15 s"
    return None, _UNKNOWN


def _name(hello: Hello) -> str:
    return next((device.name for device in hello.facts.gpu.devices if device.uuid == hello.device), "")
