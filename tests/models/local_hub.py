"""A server on this machine that speaks as much of the Hugging Face hub as a download needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serve_hub(repo: str, files: dict[str, bytes]) -> Iterator[tuple[str, list[str]]]:
    """Serves one repository; gives the server's address and the list of files fetched from it so
    far.
    """
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            prefix = f"/{repo}/resolve/"
            if path.startswith(f"/api/models/{repo}/tree/"):
                self.answer_json([_listing(name, content) for name, content in files.items()])
            elif path == f"/api/models/{repo}" or path.startswith(f"/api/models/{repo}/revision/"):
                siblings = [{"rfilename": name} for name in files]
                self.answer_json({"id": repo, "sha": COMMIT, "siblings": siblings})
            elif (
                path.startswith(prefix) and (name := path[len(prefix) :].partition("/")[2]) in files
            ):
                if self.command == "GET":
                    fetched.append(name)
                self.answer(
                    200, files[name], {"ETag": f'"{_digest(files[name])}"', "X-Repo-Commit": COMMIT}
                )
            else:
                missing = "RepoNotFound" if repo not in path else "EntryNotFound"
                self.answer(404, b"{}", {"X-Error-Code": missing})

        def do_HEAD(self) -> None:
            self.do_GET()

        def answer_json(self, value: object) -> None:
            self.answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

        def answer(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not worth a line on stderr."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", fetched
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


def _listing(name: str, content: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
