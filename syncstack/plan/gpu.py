"""Needs of the transports that move weights between GPUs. Devices are compared by UUID; an index means nothing here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from syncstack.errors import PlanError
from syncstack.facts import Facts, GpuDevice, Hello
from syncstack.plan.needs import each, on, sandboxed, sides

MIN_NOFILE = 1024
"""Descriptors that a large model's memory takes: about 50 for each GB."""


def gpus(sender: Hello, receiver: Hello) -> str | None:
    """A GPU on both sides, as a driver names it."""
    missing = [
        (name, hello.facts)
        for name, hello in sides(sender, receiver)
        if hello.facts.gpu.count == 0 and not hello.facts.gpu.devices  # under WSL a driver names devices without files
    ]
    if missing:
        return f"no GPU in {on([name for name, _ in missing])} ({missing[0][1].gpu.evidence})"
    return each(sender, receiver, _unasked)


def _unasked(facts: Facts) -> str | None:
    gpu = facts.gpu
    if gpu.devices:
        return None
    return f"has {gpu.evidence}, but its driver named no device ({gpu.problem or 'it was not asked'})"


def weights_on_gpu(sender: Hello, receiver: Hello) -> str | None:
    """The weights lie in GPU memory on both sides, of a GPU that is named."""
    missing = [name for name, hello in sides(sender, receiver) if hello.memory == "host" or not hello.device]
    return f"{on(missing)} named no GPU memory that holds the weights" if missing else None


def visible(facts: Facts) -> tuple[str, ...]:
    """UUIDs of the devices and MIG instances that this process sees, in order."""
    found = {uuid for device in facts.gpu.devices for uuid in (device.uuid, *device.mig)}
    return tuple(sorted(found))


def _device(facts: Facts, uuid: str) -> GpuDevice | None:
    """The device of that name, or the one that a MIG instance of that name is part of."""
    return next((device for device in facts.gpu.devices if uuid == device.uuid or uuid in device.mig), None)


def device_seen(sender: Hello, receiver: Hello) -> str | None:
    """The engine sees the GPU that holds the trainer's weights, and each side sees its own."""
    for name, hello, wanted, whose in (
        ("trainer", sender, sender.device, "its own weights"),
        ("engine", receiver, receiver.device, "its own weights"),
        ("engine", receiver, sender.device, "the trainer's weights"),
    ):
        if wanted and wanted not in visible(hello.facts):
            lists = [", ".join(visible(side.facts)) or "none" for side in (sender, receiver)]
            return (
                f"the {name} does not see the GPU that holds {whose} ({wanted}; the trainer sees {lists[0]}; the "
                f"engine sees {lists[1]}{_masks(hello.facts)}): give both containers one set of GPUs, or run both in "
                "one container; a plain request for a GPU in each of two containers gives two"
            )
    return None


def _masks(facts: Facts) -> str:
    """The masks that hide devices, as given."""
    return "".join(f", by {mask.name}={mask.text}" for mask in facts.gpu.masks if mask.kind != "unset")


def device_reached(sender: Hello, receiver: Hello) -> str | None:
    """One GPU, or two that reach each other's memory."""
    ours, theirs = sender.device, receiver.device
    if ours == theirs or not ours or not theirs or device_seen(sender, receiver) is not None:
        return None  # equal, or other needs say what is wrong
    device = _device(receiver.facts, theirs)
    if device is not None and device.uuid == theirs and ours in device.peers:
        return None
    peers = (", ".join(device.peers) if device is not None else "") or "none"
    return f"the engine's GPU {theirs} cannot reach the memory of the trainer's GPU {ours} (its peers: {peers})"


def shareable(sender: Hello, receiver: Hello) -> str | None:
    """Both GPUs and their drivers map memory by pages and hand it over as POSIX descriptors."""
    reasons = []
    for name, hello in sides(sender, receiver):
        device = _device(hello.facts, hello.device)
        if device is None or (device.vmm and device.posix_fd):
            continue
        shown = f"{device.name} {device.uuid}, driver {hello.facts.gpu.driver or 'unknown'}"
        if not device.vmm:
            reasons.append(f"the {name}'s GPU has no virtual memory management ({shown})")
        elif device.fabric:
            reasons.append(
                f"the {name}'s GPU hands memory over as fabric handles only, which need an IMEX channel, and not as "
                f"descriptors ({shown})"
            )
        else:
            reasons.append(f"the {name}'s GPU cannot hand memory over as descriptors ({shown})")
    return "; ".join(reasons) or None


def plain_memory(sender: Hello, _receiver: Hello) -> str | None:
    """A legacy handle takes memory of cudaMalloc only."""
    if sender.memory != "cuda-expandable":
        return None
    allocator = sender.facts.gpu.allocator
    seen = f" ({allocator.evidence})" if allocator is not None else ""
    return (
        f"the trainer's weights lie in expandable segments{seen}, which a legacy handle does not take: set "
        "expandable_segments:False in the trainer's PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF"
    )


def one_pid_namespace(sender: Hello, receiver: Hello) -> str | None:
    """Opening a legacy handle of a process in another PID namespace fails with error 201, whatever else is shared."""
    ours, theirs = (hello.facts.namespaces.get("pid", "") for hello in (sender, receiver))
    if ours and ours == theirs:
        return None
    return (
        "the engine's open of a handle would fail with error 201 (invalid device context), because the PID namespace "
        f"is not shared (trainer {ours or 'unknown'}, engine {theirs or 'unknown'}): let the two containers share one "
        '(compose, in the engine: pid: "service:trainer"; Kubernetes: shareProcessNamespace: true)'
    )


def no_sandbox(sender: Hello, receiver: Hello) -> str | None:
    """gVisor's GPU proxy forwards no memory of one process to another."""
    for name, hello in sides(sender, receiver):
        evidence = sandboxed(hello.facts)
        if evidence is not None:
            what = f"the {name} runs in a gVisor sandbox, whose GPU proxy shares no memory between processes"
            return f"{what} ({evidence})"
    return None


def open_to_two(sender: Hello, receiver: Hello) -> str | None:
    """The GPUs take more than one process."""
    for name, hello in sides(sender, receiver):
        for uuid in (sender.device, receiver.device):
            device = _device(hello.facts, uuid)
            if device is not None and device.compute_mode != "default":
                return (
                    f"GPU {device.uuid} lets in one process at a time, as the {name} sees it (compute mode "
                    f"{device.compute_mode}): set it to default on the node (nvidia-smi -c 0), or run NVIDIA's MPS"
                )
    return None


def descriptors(sender: Hello, receiver: Hello) -> str | None:
    """Enough descriptors on both sides: each chunk of GPU memory is one."""
    return each(sender, receiver, _few)


def _few(facts: Facts) -> str | None:
    soft = facts.memory.nofile_soft
    if soft is None or soft >= MIN_NOFILE:
        return None
    return f"may open {soft} descriptors, {MIN_NOFILE} are needed (compose: ulimits: {{nofile: {16 * MIN_NOFILE}}})"


def check_devices(workers: Mapping[str, Hello]) -> None:
    """Raise PlanError unless every worker holds a GPU of its own, or none holds any. ``workers``: by link name.

    What it finds are masks that went wrong: every engine on GPU 0, or one that was given none.
    """
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(workers):
        holders[workers[name].device].append(name)
    without = holders.pop("", [])
    shared = {uuid: names for uuid, names in holders.items() if len(names) > 1}
    problems = [f"{' and '.join(names)} hold the same GPU {uuid}" for uuid, names in sorted(shared.items())]
    if holders and without:
        problems.append(f"{' and '.join(without)} hold none, while others do")
    if problems:
        held = [f"{name}: {workers[name].device or 'none'}{_masks(workers[name].facts)}" for name in sorted(workers)]
        raise PlanError(
            "the engines' workers do not each hold a GPU of their own: " + "; ".join(problems),
            observed="; ".join(held),
            expected="as many distinct UUIDs as workers",
            next_step="look at the visibility masks of the engines, or set SYNCSTACK_DISTINCT_GPUS=false if they "
            "are meant to share",
        )
