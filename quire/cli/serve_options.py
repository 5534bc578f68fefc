"""The options of `quire serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

KEY_VARIABLE = "QUIRE_API_KEY"

Host = Annotated[str, typer.Option(metavar="H", help="Address to listen on; 0.0.0.0 is all.")]
Port = Annotated[int, typer.Option(metavar="P", help="Port to listen on; 0 takes a free one.")]
ServedModelName = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="What clients call the model. Repeat for several.")
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        metavar="KEY",
        help=f"A key clients must send. Repeat for several; also from {KEY_VARIABLE}, separated by commas.",
    ),
]
ApiKeyFile = Annotated[Path | None, typer.Option(metavar="FILE", help="Further keys, one per line.")]
MaxModelLen = Annotated[
    int | None, typer.Option(metavar="N", help="Longest sequence, prompt and answer; default: the model's own.")
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(metavar="N", help="Answers computed at once; default 64 on a CPU, 256 on a GPU.")
]
MaxBatchedTokens = Annotated[
    int | None, typer.Option(metavar="N", help="Tokens computed in one step; default 512 on a CPU, 8192 on a GPU.")
]
KvCacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="M",
        help="Memory for keys and values: 2GiB, or a fraction of what is free; default 0.25 on a CPU, 0.9 on a GPU.",
    ),
]
HostCacheMemory = Annotated[
    str, typer.Option(metavar="M", help="Host memory below the prefix cache, such as 4GiB; 0: none.")
]
PrefixCaching = Annotated[bool, typer.Option(help="Share the computed blocks of equal prefixes.")]
Policy = Annotated[str, typer.Option(metavar="fcfs|priority", help="Who goes first.")]
StepLog = Annotated[Path | None, typer.Option(metavar="FILE", help="Write every step to this file.")]
MaxQueuedRequests = Annotated[int, typer.Option(metavar="N", help="Answers that may wait; beyond, clients get 429.")]
MaxQueuedTokens = Annotated[int, typer.Option(metavar="N", help="Prompt tokens that may wait.")]
RequestTimeout = Annotated[float, typer.Option(metavar="S", help="Seconds a request may take.")]
QueueTimeout = Annotated[float, typer.Option(metavar="S", help="Seconds a request may wait to begin.")]
DrainTimeout = Annotated[float, typer.Option(metavar="S", help="Seconds requests get after SIGTERM.")]
StallTimeout = Annotated[float, typer.Option(metavar="S", help="Seconds without progress before /ready says no.")]
HangTimeout = Annotated[
    float, typer.Option(metavar="S", help="Seconds without progress before the engine is restarted.")
]
MaxBodySize = Annotated[str, typer.Option(metavar="M", help="Largest request body.")]
CorsOrigin = Annotated[
    list[str] | None, typer.Option(metavar="URL", help="Let web pages of this origin in. Repeat for several.")
]
AllowedHost = Annotated[
    list[str] | None, typer.Option(metavar="NAME", help="Serve only this Host header. Repeat for several.")
]
TlsCert = Annotated[Path | None, typer.Option(metavar="FILE", help="Certificate (PEM): serve HTTPS.")]
TlsKey = Annotated[Path | None, typer.Option(metavar="FILE", help="The certificate's key (PEM).")]
OtlpTracesEndpoint = Annotated[
    str | None, typer.Option(metavar="URL", help="Send spans of requests there: http://localhost:4318/v1/traces.")
]
LogFormat = Annotated[str, typer.Option(metavar="human|json", help="How the log is written.")]
LogLevel = Annotated[str, typer.Option(metavar="debug|info|warning|error", help="What is logged.")]
