"""``syncstack run JOB``: connect to the engines, run the job, leave a report whatever happens."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import httpx
import typer
from rich.console import Console

from syncstack.errors import RefitFailed, SyncstackError, UsageError
from syncstack.facts import version_of
from syncstack.run import schema
from syncstack.run.context import RunContext
from syncstack.run.folder import ModelFolder, validate
from syncstack.run.picture import render
from syncstack.run.recorder import REPORT_NAME, Recorder, now
from syncstack.run.table import Table, summary
from syncstack.settings import Settings

if TYPE_CHECKING:
    from syncstack.run.crew import Crew

PICTURE_NAME = "report.html"
INTERRUPTED = 130
DEFAULT_URL = "http://engine:8000"
DEFAULT_JOB = "examples.grpo.job:main"

Job = Callable[[RunContext], None]


def run(
    job: Annotated[str, typer.Argument(help="What to run, as module:function.")] = DEFAULT_JOB,
    engine: Annotated[list[str] | None, typer.Option(help="Control address of an engine; repeatable.")] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(help=f"Where an engine's /v1 API answers; one for each --engine; for one: {DEFAULT_URL}."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps; each ends with a refit.")] = 24,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts and samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of this run's report and picture.")] = Path("out/latest"),
    model: Annotated[Path, typer.Option(envvar="SYNCSTACK_MODEL", help="Hugging Face folder to train.")] = Path(
        "/models/smollm2-135m-instruct"
    ),
    metrics: Annotated[
        str | None, typer.Option(envvar="SYNCSTACK_METRICS", help="Serve Prometheus metrics at ADDRESS:PORT.")
    ] = None,
    end_engines: Annotated[
        bool, typer.Option("--end-engines", help="End the engines once the job has succeeded: a batch job's, say.")
    ] = False,
    layout: Annotated[str, typer.Option(envvar="SYNCSTACK_LAYOUT", help="Written into the report.")] = "colocated",
) -> None:
    """Train: samples from the engines, an update, the new weights back into all of them, and proof of each."""
    folder = validate(model)
    function = load_job(job)
    settings = Settings.load()
    addresses, urls = engines_of(settings, engine, engine_url, end_engines=end_engines)
    prepare_out(out)
    expose(metrics)
    console = Console(file=sys.stdout)
    table = Table(console)
    recorder = Recorder(first_report(job, seed, layout, settings.profile, addresses, folder, out), out, table)
    status, error = "failed", None
    try:
        with table, terminable():
            execute(function, recorder, settings, addresses, urls, folder, steps, seed, out, end_engines=end_engines)
        status = "ok"
    except KeyboardInterrupt:
        status, error = "interrupted", "stopped by a signal"
        raise SystemExit(INTERRUPTED) from None
    except BaseException as failure:
        error = one_line(failure)
        if isinstance(failure, RefitFailed):
            recorder.phase_name = f"refit: {failure.phase}"
        raise
    finally:
        close_report(recorder, status, error, out)
        console.print(summary(recorder.report, str(recorder.path)), highlight=False, soft_wrap=True)


def expose(address: str | None) -> None:
    """Serve this process's metrics, to read only, if an address is given. Raises UsageError."""
    if address is None:
        return
    from prometheus_client import start_http_server

    from syncstack.wire.tcp import Address

    where = Address.parse(f"tcp://{address}")
    try:
        start_http_server(where.port, addr=where.host)
    except OSError as error:
        raise UsageError(
            f"metrics cannot be served at {address}",
            observed=str(error),
            consequence="Nothing was started",
            next_step="choose another --metrics",
        ) from None


def load_job(name: str) -> Job:
    """The function that ``module:function`` names, also from the working directory. Raises UsageError."""
    module_name, _, function_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # a console script's sys.path lacks it
    hint = "give a job as module:function, from the folder that holds the module"
    try:
        module = importlib.import_module(module_name)
    except (ImportError, ValueError) as error:
        raise UsageError(f"job {name!r} cannot be imported", observed=one_line(error), next_step=hint) from error
    function = getattr(module, function_name, None) if function_name else None
    if not callable(function):
        raise UsageError(f"job {name!r} names no function", next_step=hint)
    return function  # type: ignore[no-any-return]


def prepare_out(out: Path) -> None:
    """Make the run's folder and prove that it can be written. Raises UsageError."""
    probe = out / f".{REPORT_NAME}.probe"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"results cannot be written to {out}",
            observed=error.strerror,
            consequence="Nothing was started",
            next_step="name a writable folder with --out",
        ) from error


def engines_of(
    settings: Settings, engine: Sequence[str] | None, engine_url: Sequence[str] | None, *, end_engines: bool
) -> tuple[Sequence[str], Sequence[str]]:
    """Addresses and URLs of the engines; with a fleet, their names, and no URL is known yet. Raises UsageError."""
    if not settings.fleet:
        addresses = engine or [f"unix:{settings.socket_dir / settings.engine_name}"]
        return addresses, urls_of(addresses, engine_url)
    if engine or engine_url or end_engines:
        raise UsageError(
            "the engines of this run were placed by syncstack launch, which ends them too",
            observed="--engine, --engine-url or --end-engines",
            consequence="Nothing was started",
            next_step="leave them out",
        )
    from syncstack.fleet.crew import fleet_spec

    return fleet_spec(settings).engines, []


def urls_of(addresses: Sequence[str], urls: Sequence[str] | None) -> Sequence[str]:
    """Where the API of each engine answers. Raises UsageError where that was not said for all of them."""
    if not urls and len(addresses) == 1:
        return [DEFAULT_URL]
    if len(urls or []) != len(addresses):
        raise UsageError(
            "each engine needs the URL of its API",
            observed=f"{len(addresses)} --engine, {len(urls or [])} --engine-url",
            consequence="Nothing was started",
            next_step="give one --engine-url for each --engine, in the same order",
        )
    return list(urls or [])


def first_report(
    job: str, seed: int, layout: str, profile: str, addresses: Sequence[str], folder: ModelFolder, out: Path
) -> schema.RunReport:
    """The report of a run that has only begun."""
    return schema.RunReport(
        syncstack=version_of("syncstack") or "not installed",
        run=out.resolve().name,
        job=job,
        seed=seed,
        layout=layout,
        profile=profile,
        engines=[schema.EngineInfo(name=each.rstrip("/").rpartition("/")[2], address=each) for each in addresses],
        model=schema.ModelInfo(name=folder.name, parameters=folder.parameters, bytes=folder.bytes, dtype=folder.dtype),
        facts=collect_facts(),
        reward=schema.Reward(),
        steps=[],
        refits=[],
        started=now(),
        outcome=schema.Outcome(status="running"),
    )


def collect_facts() -> schema.FactsInfo:
    """This process's facts, as far as the report has them."""
    from syncstack.facts import collect

    facts = collect()
    verdicts: dict[str, str] = {name: fact.verdict for name, fact in facts.syscalls.items()}
    return schema.FactsInfo(pidfd_getfd=facts.pidfd_getfd.verdict, syscalls=verdicts)


def execute(
    job: Job,
    recorder: Recorder,
    settings: Settings,
    addresses: Sequence[str],
    urls: Sequence[str],
    folder: ModelFolder,
    steps: int,
    seed: int,
    out: Path,
    *,
    end_engines: bool,
) -> None:
    """Connect, run the job, end the engines if they are to end with it, disconnect."""
    with ExitStack() as stack:
        with recorder.phase("connect"):
            crew = stack.enter_context(crew_of(settings, addresses, urls))
            for index, (client, url) in enumerate(zip(crew.engines, crew.urls, strict=True)):
                recorder.engine(index, client.name, engine_version(url) or client.info.kind_version)
        context = RunContext(
            settings=settings,
            engines=crew.engines,
            engine_urls=crew.urls,
            model=Path(folder.path),
            steps=steps,
            seed=seed,
            out=out,
            recorder=recorder,
            make_coordinator=crew.make_coordinator,
        )
        with recorder.phase("job"):
            job(context)
        if end_engines:
            with recorder.phase("end the engines"):
                crew.end()


def crew_of(settings: Settings, addresses: Sequence[str], urls: Sequence[str]) -> AbstractContextManager[Crew]:
    """The engines at these addresses, or those of this process's launch."""
    from syncstack.run.crew import named

    if not settings.fleet:
        return named(addresses, urls, settings)
    from syncstack.fleet.crew import crew

    return crew(settings)


def engine_version(url: str) -> str | None:
    """What the engine's ``/version`` route says, or None: not every engine has one."""
    try:
        return str(httpx.get(f"{url.rstrip('/')}/version", timeout=5.0).raise_for_status().json()["version"])
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError):
        return None


def close_report(recorder: Recorder, status: str, error: str | None, out: Path) -> None:
    """Write the outcome and the picture."""
    recorder.finish(status, error)
    schema.write_text(out / PICTURE_NAME, render(recorder.report))


def one_line(error: BaseException) -> str:
    """An error as one line: syncstack's own speak for themselves, others are named."""
    text = str(error) if isinstance(error, SyncstackError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that ``docker stop`` leaves a finished report."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        del signum, frame
        raise KeyboardInterrupt

    # SIGINT too: a shell starts its background commands with it ignored, and Python then leaves it so.
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
