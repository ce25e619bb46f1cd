"""A Hugging Face Hub on loopback, as far as its client needs one: revisions, file lists, files, errors, a CDN host.

Every request is recorded. Big files (as the Hub keeps .safetensors and .pt) are named by their sha256 and served, after
a redirect, under another host name, where the token must not go.
"""

from __future__ import annotations

import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

BIG = (".safetensors", ".pt")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a client asked for. host: as it named the server. token: it sent."""

    method: str
    path: str
    host: str
    token: str | None
    range: str | None


@dataclass
class Repository:
    """refs: branch or tag -> commit; commits: commit -> file -> content. token: only who sends it may look."""

    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str | None = None
    gated: bool = False


class Hub:
    """The server. broken: files of which one download is cut off in the middle; stalled: that stop there for good.
    down: a status for everything; instead: a body for everything that the API is asked, as a login page of the network
    has one; dying: a file that was cut off is gone afterwards."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[Request] = []
        self.broken: set[str] = set()
        self.stalled: set[str] = set()
        self.down: int | None = None
        self.instead: bytes | None = None
        self.dying = False
        self.gone: set[str] = set()
        self.release = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def publish(self, repository: str, directory: Path, *, ref: str = "main", **extra: bytes) -> str:
        """A commit of every file below `directory` (and of `extra`), which `ref` points to from now on."""
        found = {
            path.relative_to(directory).as_posix(): path.read_bytes()
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        files = {
            ".gitattributes": b"*.safetensors filter=lfs\n",
            "README.md": b"# a model\n",
            **found,
            **extra,
        }
        home = self.repositories.setdefault(repository, Repository())
        text = "".join(f"{name} {hashlib.sha1(data).hexdigest()}\n" for name, data in sorted(files.items()))
        commit = hashlib.sha1(f"{repository}\n{text}".encode()).hexdigest()
        home.commits[commit] = files
        home.refs[ref] = commit
        return commit

    def downloads(self) -> list[str]:
        """The files whose content was asked for, each time it was."""
        return [
            r.path.split("/", 2)[-1]
            for r in self.requests
            if r.method == "GET" and r.path.startswith("/file/")
        ]

    def asked(self) -> list[str]:
        """Method and path of every request, and none is left over."""
        found = [f"{request.method} {request.path}" for request in self.requests]
        self.requests.clear()
        return found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(_Handler):
            server_hub = hub

        return Handler


class _Handler(BaseHTTPRequestHandler):
    server_hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""

    def _answer(self) -> None:
        hub, path = self.server_hub, urlsplit(self.path).path
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        parts = [unquote(part) for part in path.strip("/").split("/")]
        shown, action = path, self._missing
        if hub.down is not None:
            action = lambda: self._error(hub.down or 500, None)  # noqa: E731
        elif hub.instead is not None and parts[0] == "api":
            action = lambda: self._body(hub.instead or b"")  # noqa: E731
        elif parts[:2] == ["api", "models"] and len(parts) >= 4:
            action = lambda: self._api("/".join(parts[2:4]), parts[4:], token)  # noqa: E731
        elif parts[0] == "cdn":
            name = "/".join(parts[3:])
            shown = f"/file/{name}"
            action = lambda: self._file("/".join(parts[1:3]), name)  # noqa: E731
        elif len(parts) >= 5 and parts[2] == "resolve":
            name, big = "/".join(parts[4:]), parts[-1].endswith(BIG)
            shown = path if self.command == "HEAD" or big else f"/file/{name}"
            action = lambda: self._resolve("/".join(parts[:2]), parts[3], name, token)  # noqa: E731
        hub.requests.append(
            Request(
                method=self.command,
                path=shown,
                host=self.headers["Host"].partition(":")[0],
                token=token,
                range=self.headers.get("Range"),
            )
        )
        action()

    def _missing(self) -> None:
        self._error(404, None)

    def _repository(self, name: str, token: str | None) -> Repository | None:
        found = self.server_hub.repositories.get(name)
        if found is None or (found.token is not None and found.token != token):
            self._error(404 if token else 401, "RepoNotFound")
            return None
        return found

    def _commit(self, repository: Repository, revision: str) -> str | None:
        commit = repository.refs.get(revision, revision)
        if commit not in repository.commits:
            self._error(404, "RevisionNotFound")
            return None
        return commit

    def _api(self, name: str, rest: list[str], token: str | None) -> None:
        repository = self._repository(name, token)
        if repository is None:
            return
        commit = self._commit(repository, rest[1] if len(rest) > 1 else "main")
        if commit is None:
            return
        files = repository.commits[commit]
        document: Any = {
            "id": name,
            "modelId": name,
            "sha": commit,
            "private": False,
            "tags": [],
            "downloads": 0,
        }
        document["siblings"] = [{"rfilename": path} for path in files]
        if rest[:1] == ["tree"]:
            document = [
                {"type": "file", "path": path, "size": len(data), "oid": _git_sha1(data)}
                | (
                    {"lfs": {"oid": _sha256(data), "size": len(data), "pointerSize": 130}}
                    if path.endswith(BIG)
                    else {}
                )
                for path, data in files.items()
            ]
        self._body(json.dumps(document).encode())

    def _body(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _resolve(self, repository_name: str, revision: str, name: str, token: str | None) -> None:
        repository = self._repository(repository_name, token)
        if repository is None:
            return
        commit = self._commit(repository, revision)
        if commit is None:
            return
        if repository.gated and not token:
            self._error(403, "GatedRepo")
        elif name not in repository.commits[commit]:
            self._error(404, "EntryNotFound", commit=commit)
        elif name.endswith(BIG):
            data = repository.commits[commit][name]
            self.send_response(302)
            port = self.server_hub.port
            self.send_header(
                "Location", f"http://localhost:{port}/cdn/{repository_name}/{name}?commit={commit}"
            )
            self.send_header("X-Repo-Commit", commit)
            self.send_header("X-Linked-Etag", f'"{_sha256(data)}"')
            self.send_header("X-Linked-Size", str(len(data)))
            self.send_header("Content-Length", "0")
            self.end_headers()
        else:
            data = repository.commits[commit][name]
            self._send(name, data, {"ETag": f'"{_git_sha1(data)}"', "X-Repo-Commit": commit})

    def _file(self, repository_name: str, name: str) -> None:
        if name in self.server_hub.gone:
            self._error(404, None)
            return
        commit = urlsplit(self.path).query.removeprefix("commit=")
        data = self.server_hub.repositories[repository_name].commits[commit][name]
        self._send(name, data, {"ETag": f'"{_sha256(data)}"'})

    def _send(self, name: str, data: bytes, headers: dict[str, str]) -> None:
        hub = self.server_hub
        start = (
            int(self.headers["Range"].removeprefix("bytes=").partition("-")[0])
            if self.headers.get("Range")
            else 0
        )
        self.send_response(206 if start else 200)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(data) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        end = len(data)
        if name in hub.broken | hub.stalled:
            end = start + (len(data) - start) // 2
        self.wfile.write(data[start:end])
        self.wfile.flush()
        if name in hub.stalled:
            hub.release.wait(60)
        elif end < len(data):
            hub.broken.discard(name)
            hub.gone |= {name} if hub.dying else set()
            self.close_connection = True
            self.connection.close()  # less than was announced: the connection is cut

    def _error(self, status: int, code: str | None, *, commit: str | None = None) -> None:
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        if commit is not None:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _git_sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
