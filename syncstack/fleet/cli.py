"""``syncstack node`` and ``syncstack launch``: this container as a node of a Ray cluster, and what is placed on it."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shlex
from typing import Annotated, cast

import typer

from syncstack.errors import UsageError
from syncstack.fleet.join import beside, prepare
from syncstack.fleet.node import ROLES, Role, ray_environment
from syncstack.fleet.placement import Layout
from syncstack.settings import Settings
from syncstack.wire.tcp import Address

log = logging.getLogger(__name__)

Join = Annotated[
    str | None, typer.Option(envvar="SYNCSTACK_CLUSTER", help="HOST:PORT of the cluster's head.", show_default=False)
]


def node(
    role: Annotated[list[str], typer.Option(help="What may be placed here: trainer, engine, driver; repeatable.")],
    head: Annotated[
        str | None, typer.Option(help="Begin a cluster; the others reach it at HOST:PORT, an address of this machine.")
    ] = None,
    join: Join = None,
    name: Annotated[str | None, typer.Option(help="Name of the node; unset: SYNCSTACK_ENGINE_NAME.")] = None,
    dashboard: Annotated[bool, typer.Option("--dashboard", help="Ray's dashboard, on 127.0.0.1 of the head.")] = False,
) -> None:
    """A node of the cluster on which `syncstack launch` places trainer and engines. Stays until it is ended.

    Needs a token (SYNCSTACK_TOKEN_FILE), the same on all nodes; Ray gets a secret that is derived from it. Wraps
    `ray start`: its ports come from our band, it offers roles instead of processors, and reports to nobody.
    """
    _needs_ray()
    if dashboard and importlib.util.find_spec("aiohttp_cors") is None:
        raise UsageError("Ray's dashboard is not installed here", next_step="pip install 'ray[default]'")
    roles = _roles(role)
    where = _cluster(head or join, "--head HOST:PORT, or --join HOST:PORT")
    found = prepare(Settings.load(), roles, where, os.environ, is_head=bool(head), name=name, dashboard=dashboard)
    log.info("%s is a node of %s at %s for %s", found.node.name, where.netloc, found.node.address, ", ".join(roles))
    os.execve(found.command[0], found.command, found.environment)  # noqa: S606 - a shell is what we do not want


def launch(
    command: Annotated[list[str], typer.Argument(help="What the trainer's container runs, after `--`.")],
    engine: Annotated[
        str, typer.Option(envvar="SYNCSTACK_ENGINE_COMMAND", help="What each engine's container runs, as one string.")
    ],
    engines: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    layout: Annotated[
        str, typer.Option(envvar="SYNCSTACK_LAYOUT", help="colocated: all on one machine; disagg: each elsewhere.")
    ] = "colocated",
    join: Join = None,
    here: Annotated[
        bool, typer.Option("--here", help="This container is a node too, while it lasts: the trainer's.")
    ] = False,
    wait: Annotated[float, typer.Option(min=0, help="Seconds to wait for enough nodes.")] = 60.0,
    stay: Annotated[bool, typer.Option("--stay", help="Leave the engines serving when the trainer has ended.")] = False,
) -> None:
    """Place a trainer and its engines on a cluster, run both, and end as the trainer does. Run it on a node, or --here.

    The trainer starts the engines, watches them, and brings one that comes back to the last version (`syncstack run`,
    or syncstack.fleet in your own trainer). One line for both layouts:

        syncstack launch --engines 2 --engine "syncstack engine vllm --model M" -- syncstack run --model M
    """
    settings = Settings.load()
    secret = settings.required_token("a Ray cluster").cluster_secret
    _needs_ray()
    where = _cluster(join, "--join HOST:PORT, or SYNCSTACK_CLUSTER")
    own = prepare(settings, ("trainer", "driver"), where, os.environ, name="trainer") if here else None
    os.environ.update(ray_environment(secret, os.environ))  # read when ray is imported, which is now
    from syncstack.fleet.launch import Job
    from syncstack.fleet.launch import launch as run
    from syncstack.run.cli import INTERRUPTED, terminable

    job = Job(
        cluster=where.netloc,
        secret=secret,
        layout=_layout(layout),
        engines=engines,
        engine_command=tuple(shlex.split(engine)),
        trainer_command=tuple(command),
        trainer=own.node.name if own else None,
        wait_s=wait,
        stay=stay,
    )
    try:
        with terminable(), beside(own) if own else contextlib.nullcontext():
            code = run(job)
    except KeyboardInterrupt:
        code = INTERRUPTED
    raise typer.Exit(code)


def _needs_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError("Ray is not installed here", next_step="pip install 'syncstack[fleet]'")


def _layout(name: str) -> Layout:
    if name not in ("colocated", "disagg"):
        raise UsageError(f"no such layout: {name}", expected="colocated or disagg")
    return cast(Layout, name)


def _roles(names: list[str]) -> tuple[Role, ...]:
    unknown = sorted(set(names) - set(ROLES))
    if unknown:
        raise UsageError(f"no such role: {', '.join(unknown)}", expected=", ".join(ROLES))
    return tuple(role for role in ROLES if role in names)


def _cluster(text: str | None, option: str) -> Address:
    where = Address.parse(f"tcp://{text}") if text else None
    if where is None or where.port == 0:
        raise UsageError(
            "nobody said which cluster is meant",
            observed=repr(text),
            consequence="Nothing was started",
            next_step=f"give {option}",
        )
    return where
