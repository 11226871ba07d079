"""The GPUs, as far as they can be told without opening one."""

from __future__ import annotations

from typing import Final

from syncstack.doctor import ways
from syncstack.doctor.model import Check, Finding, Remedy, broken, holds, skip
from syncstack.doctor.needs import DRIVER, GPU
from syncstack.facts import Facts, VisibilityMask
from syncstack.facts.visibility import repeated

_GIVE: Final = Remedy(
    compose="deploy: {resources: {reservations: {devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]}}}",
    kubernetes='resources: {limits: {"nvidia.com/gpu": 1}}',
)
_PERMIT: Final = Remedy(
    other="on the node: /dev/nvidia* of mode 0666 (NVreg_DeviceFileMode), or the group that owns them for the user",
    compose='group_add: ["GID of /dev/nvidia0"], and the devices by deploy.resources, not by volumes',
    kubernetes="securityContext: {supplementalGroups: [GID of /dev/nvidia0]}",
)
_LIBRARY: Final = Remedy(
    compose="environment: {NVIDIA_DRIVER_CAPABILITIES: compute,utility}",
    kubernetes="env: [{name: NVIDIA_DRIVER_CAPABILITIES, value: compute,utility}]",
)
_UNKNOWN: Final = Remedy(other="see what nvidia-smi says in the same container")
_NO_USE: Final = "Nothing here can use the host's GPUs; weights go through its memory"
# By the words before the colon of GpuFacts.problem: three causes that look alike to a program, and three remedies.
_PROBLEMS: Final = {"no GPU node": _GIVE, "no permission": _PERMIT, "no driver library": _LIBRARY}


def _devices(facts: Facts) -> Finding:
    gpu = facts.gpu
    if not gpu.problem:
        named = [f"{device.name} ({device.memory_bytes / (1 << 30):.0f} GiB)" for device in gpu.devices]
        detail = f"; {', '.join(named)}; driver {gpu.driver}" if named else ""
        return holds(f"{gpu.count or len(gpu.devices) or 'none'}: {gpu.evidence}{detail}")
    cuda = next((mask for mask in gpu.masks if mask.name == "CUDA_VISIBLE_DEVICES"), None)
    if cuda is not None and gpu.problem.startswith("hidden:"):
        if cuda.kind == "none" and not cuda.stopped_at:  # Ray does this to a process that asked for no GPU
            return holds(gpu.problem)
        return broken(gpu.problem, _NO_USE, _unmask(cuda.name))
    # A host with GPUs runs containers that want none, too.
    asked = any(mask.name == "NVIDIA_VISIBLE_DEVICES" and mask.kind in ("all", "list") for mask in gpu.masks)
    if not gpu.count and not asked:
        return holds(gpu.problem)
    return broken(
        f"{gpu.problem} ({gpu.evidence})" if gpu.evidence not in gpu.problem else gpu.problem,
        _NO_USE,
        _PROBLEMS.get(gpu.problem.partition(":")[0], _UNKNOWN),
    )


def _masks(facts: Facts) -> Finding:
    masks = [mask for mask in facts.gpu.masks if mask.kind != "unset"]
    if not masks:
        return holds("no mask is set")
    mask, wrong, consequence = next(((mask, *bad) for mask in masks if (bad := _wrong(mask))), (masks[0], "", ""))
    if not wrong:
        return holds(", ".join(f"{mask.name}={mask.text}" for mask in masks))
    return broken(f"{mask.name}={mask.text}: {wrong}", consequence, _unmask(mask.name))


def _wrong(mask: VisibilityMask) -> tuple[str, str] | None:
    """What is wrong with a mask, and what follows."""
    twice = repeated(mask) if mask.name == "CUDA_VISIBLE_DEVICES" else ""
    if twice:
        return f"{twice} names a device for the second time", "The driver refuses the whole mask: no device is seen"
    if mask.misread:
        return f"the driver takes {mask.misread}", f"What is seen: {', '.join(mask.entries)}"
    if mask.stopped_at:
        seen = f"only what stands before it is seen: {', '.join(mask.entries)}" if mask.entries else "no device is seen"
        return f"entry {mask.stopped_at} is none", f"The driver stops reading there without a word; {seen}"
    return None


def _unmask(name: str) -> Remedy:
    return Remedy(
        other="entries are indices, GPU-... or MIG-... names, also shortened, with commas and no spaces between",
        compose=f"environment: {{{name}: GPU-...}}",
        kubernetes=f"no env {name} in the pod: the device plugin sets what it gives",
    )


def _compute_mode(facts: Facts) -> Finding:
    closed = [device for device in facts.gpu.devices if device.compute_mode not in ("default", "unknown")]
    if not closed:
        return holds("compute mode default")
    return broken(
        ", ".join(f"GPU {device.index} ({device.name}): {device.compute_mode}" for device in closed),
        "Trainer and engine cannot both use this GPU",
        Remedy(other="on the node: nvidia-smi -c DEFAULT, or a sharing service (MPS) that both containers can reach"),
    )


def _allocator(facts: Facts) -> Finding:
    allocator = facts.gpu.allocator
    if allocator is None:
        return skip("the allocator's setting is not known")
    if not allocator.expandable_segments or not ways.no_pidfd(facts):
        return holds(allocator.evidence)
    return broken(
        f"expandable segments are on: {allocator.evidence}",
        "torch's own IPC of these tensors needs pidfd_getfd, which is refused here, and vLLM's sleep mode refuses them",
        Remedy(
            other="nothing, if only syncstack moves the weights",
            compose='environment: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:False"}',
            kubernetes='env: [{name: PYTORCH_CUDA_ALLOC_CONF, value: "expandable_segments:False"}]',
        ),
    )


def _mig(facts: Facts) -> Finding:
    sliced = [device for device in facts.gpu.devices if device.mig]
    if not sliced:
        return holds("no device is partitioned")
    parts = "; ".join(f"GPU {device.index}: {', '.join(device.mig)}" for device in sliced)
    return holds(f"{parts}; trainer and engine share memory only inside one partition")


def _handles(facts: Facts) -> Finding:
    devices = facts.gpu.devices
    mute = [device for device in devices if not (device.vmm and (device.posix_fd or device.fabric))]
    if mute:
        return broken(
            ", ".join(
                f"GPU {device.index} ({device.name}): no handle that another process can open" for device in mute
            ),
            "Memory of this GPU cannot be handed to an engine; weights go through host memory",
            Remedy(other="a driver with virtual memory management and POSIX handles (not vGPU, not WSL)"),
        )
    if not all(device.fabric for device in devices):
        return holds("descriptors; no fabric handles, which only NVLink over several hosts needs")
    return holds(
        'descriptors, and fabric handles where there is an IMEX channel: without one, "not permitted" means '
        "the channel and not memory, and descriptors are used",
        Remedy(
            other="over several hosts of one NVLink domain: nodes with nvidia-imex running",
            compose='devices: ["/dev/nvidia-caps-imex-channels/channel0"]',
            kubernetes="resourceClaims: one of a ComputeDomain (NVIDIA's DRA driver)",
        ),
    )


CHECKS: Final = (
    Check(id="gpu.devices", assertion="the GPUs that there are can be used", severity="warn", find=_devices),
    Check(id="gpu.masks", assertion="every entry of a visibility mask is understood", severity="warn", find=_masks),
    Check(
        id="gpu.compute-mode",
        assertion="two processes may use one GPU",
        severity="warn",
        needs=(DRIVER,),
        find=_compute_mode,
    ),
    Check(
        id="gpu.allocator",
        assertion="torch's GPU memory can be handed over by torch itself",
        severity="warn",
        needs=(GPU,),
        find=_allocator,
    ),
    Check(id="gpu.mig", assertion="partitions are listed", severity="warn", needs=(DRIVER,), find=_mig),
    Check(
        id="gpu.handles",
        assertion="GPU memory can be exported as a handle",
        severity="warn",
        needs=(DRIVER,),
        find=_handles,
    ),
)
