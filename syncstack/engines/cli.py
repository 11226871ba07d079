"""``syncstack engine KIND``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from syncstack.settings import Settings

app = typer.Typer(
    no_args_is_help=True, help="Start an inference engine with syncstack's control endpoint beside its own server."
)

Model = Annotated[Path, typer.Option(envvar="SYNCSTACK_MODEL", help="Hugging Face model folder (safetensors).")]
Name = Annotated[str, typer.Option(envvar="SYNCSTACK_ENGINE_NAME", help="Folder below the socket folder, and name.")]
Host = Annotated[str, typer.Option(help="Address that the engine's own server listens on.")]
Port = Annotated[int, typer.Option(min=1, max=65535, help="Port that the engine's own server listens on.")]
Dtype = Annotated[str, typer.Option(help="Dtype of the weights in the engine.")]
SocketDir = Annotated[
    Path | None, typer.Option(help="Folder shared with the trainer. [env: SYNCSTACK_SOCKET_DIR]", show_default=False)
]

Listen = Annotated[
    str | None,
    typer.Option(
        help="Where syncstack listens: `unix` (the default), `tcp://ADDRESS:PORT` (or `:auto`), or both with a comma. "
        "TCP needs SYNCSTACK_TOKEN_FILE. [env: SYNCSTACK_LISTEN]",
        show_default=False,
    ),
]


def _server(kind: str, title: str, server: str) -> None:
    """Add the command that becomes an engine's own server."""

    def start(
        context: typer.Context,
        model: Model,
        name: Name = "engine-0",
        host: Host = "127.0.0.1",
        port: Port = 8000,
        dtype: Dtype = "bfloat16",
        socket_dir: SocketDir = None,
        listen: Listen = None,
    ) -> None:
        launch = import_module(f"syncstack.engines.{kind}.launch").launch
        settings = Settings.load(socket_dir=socket_dir, engine_name=name, listen=listen)
        launch(model=model, host=host, port=port, dtype=dtype, extra=context.args, settings=settings)

    extra = {"allow_extra_args": True, "ignore_unknown_options": True}
    about = f"Real {title}. Arguments after `--` go to {server} as they are."
    app.command(kind, help=about, context_settings=extra)(start)


_server("vllm", "vLLM", "`vllm serve`")
_server("sglang", "SGLang", "SGLang's server")


@app.command()
def reference(
    model: Model,
    name: Name = "engine-0",
    host: Host = "127.0.0.1",
    port: Port = 8000,
    dtype: Dtype = "float32",
    socket_dir: SocketDir = None,
    listen: Listen = None,
) -> None:
    """A plain-torch engine for tests; serves one greedy request at a time."""
    from syncstack.engines.reference.engine import serve

    settings = Settings.load(socket_dir=socket_dir, engine_name=name, listen=listen)
    serve(model=model, host=host, port=port, dtype=dtype, settings=settings)
