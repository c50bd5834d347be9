"""A server of this machine that speaks as much of the Hugging Face hub's HTTP API as a push and a pull need.

It keeps repositories as git does: commits of files, a branch, tags; safetensors and pictures go to large file storage,
under another host name, as on the real hub.  ``faults`` are asked before every request and may answer in its place.
"""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

TOKEN = "hf_of_the_tests"
LARGE = (".safetensors", ".png", ".bin", ".pkl")


def git_blob(data: bytes) -> str:
    return sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass
class Repository:
    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # oldest first
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    def commit(self, files: dict[str, bytes]) -> str:
        oid = sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[oid] = files
        return oid

    def find(self, revision: str) -> str | None:
        if revision == "main":
            return self.head
        return self.tags.get(revision, revision if revision in self.commits else None)


Fault = Callable[["Request"], bool]  # True: it has answered


class Hub:
    """The server's state, for tests to prepare, spoil and look at."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []  # "GET /path"
        self.leaked: list[str] = []  # requests to the storage that carried the token
        self.url = ""

    def repository(self, name: str, files: dict[str, bytes] | None = None, *, tag: str | None = None) -> Repository:
        """A repository as somebody else may have made it."""
        made = self.repositories.setdefault(name, Repository())
        oid = made.commit({".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})})
        if tag is not None:
            made.tags[tag] = oid
        return made

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, request)) for request in self.requests)


class Request(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self.route = unquote(urlsplit(self.path).path)
        self.query = parse_qs(urlsplit(self.path).query)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append(f"{self.command} {self.route}")
        self.trusted = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if any(fault(self) for fault in list(self.hub.faults)):
            return
        for methods, pattern, handler in ROUTES:
            found = re.fullmatch(pattern, self.route)
            if found and self.command in methods:
                handler(self, *found.groups())
                return
        self.refuse(404, "no such route")

    do_HEAD = do_POST = do_PUT = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, kind: str = "application/octet-stream", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def json(self, document: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(document).encode(), "application/json")

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, json.dumps({"error": message}).encode(), "application/json", **headers)

    def open(self, name: str, revision: str = "main", *, write: bool = False) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(name)
        if repository is None or (repository.private and not self.trusted):
            self.refuse(404 if self.trusted else 401, "Repository not found", "RepoNotFound")
            return None
        if write and not self.trusted:
            self.refuse(401, "Invalid credentials")
            return None
        commit = repository.find(revision)
        if commit is None:
            self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
            return None
        return repository, commit


def create(request: Request) -> None:
    wanted = json.loads(request.body)
    name = f"{wanted['organization']}/{wanted['name']}"
    if not request.trusted:
        request.refuse(401, "Invalid username or password.")
    elif name in request.hub.repositories:
        request.refuse(409, "You already created this model repo")
    else:
        request.hub.repository(name).private = wanted.get("visibility") == "private"
        request.json({"url": f"{request.hub.url}/{name}"})


def info(request: Request, name: str, revision: str | None) -> None:
    found = request.open(name, revision or "main")
    if found is None:
        return
    repository, commit = found
    siblings: list[dict[str, Any]] = []
    for path, data in repository.commits[commit].items():
        siblings.append({"rfilename": path})
        if "blobs" in request.query:
            siblings[-1] |= {"size": len(data), "blobId": git_blob(data)}
            if path.endswith(LARGE):
                siblings[-1]["lfs"] = {"size": len(data), "sha256": sha256(data).hexdigest(), "pointerSize": 130}
    request.json({"id": name, "modelId": name, "sha": commit, "private": repository.private, "siblings": siblings})


def refs(request: Request, name: str) -> None:
    found = request.open(name)
    if found is None:
        return
    repository, head = found
    tags = [{"name": t, "ref": f"refs/tags/{t}", "targetCommit": oid} for t, oid in repository.tags.items()]
    branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": head}
    request.json({"branches": [branch], "converts": [], "tags": tags})


def validate(request: Request) -> None:
    """The front matter is YAML, and ``base_model`` is no path."""
    content = json.loads(request.body)["content"]
    parts = content.split("---\n")
    try:
        metadata = yaml.safe_load(parts[1]) if content.startswith("---\n") else {}
    except yaml.YAMLError as error:
        request.json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return
    model = metadata.get("base_model", "a/b")
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model):
        request.json({"errors": [{"message": f'"base_model" with value "{model}" is not valid'}], "warnings": []}, 400)
        return
    request.json({"errors": [], "warnings": []})


def preupload(request: Request, name: str, revision: str) -> None:
    found = request.open(name, revision, write=True)
    if found is None:
        return
    there = found[0].commits[found[1]]
    files = []
    for wanted in json.loads(request.body)["files"]:
        path, large = wanted["path"], wanted["path"].endswith(LARGE)
        oid = None
        if path in there:
            oid = sha256(there[path]).hexdigest() if large else git_blob(there[path])
        files.append({"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid})
    request.json({"files": files})


def batch(request: Request, name: str) -> None:
    if request.open(name, write=True) is None:
        return
    storage = request.hub.url.replace("127.0.0.1", "localhost")
    objects = []
    for wanted in json.loads(request.body)["objects"]:
        objects.append({"oid": wanted["oid"], "size": wanted["size"]})
        if wanted["oid"] not in request.hub.storage:
            objects[-1]["actions"] = {"upload": {"href": f"{storage}/storage/{wanted['oid']}"}}
    request.json({"transfer": "basic", "objects": objects})


def upload(request: Request, oid: str) -> None:
    if "Transfer-Encoding" in request.headers:
        request.body = b"".join(chunks(request))
    if sha256(request.body).hexdigest() != oid:
        request.refuse(400, "other bytes than announced")
        return
    request.hub.storage[oid] = request.body
    request.answer(200, b"")


def chunks(request: Request) -> Iterator[bytes]:
    while size := int(request.rfile.readline(), 16):
        yield request.rfile.read(size)
        request.rfile.readline()
    request.rfile.readline()


def commit(request: Request, name: str, revision: str) -> None:
    found = request.open(name, revision, write=True)
    if found is None:
        return
    repository, head = found
    files = dict(repository.commits[head])
    for line in request.body.splitlines():
        operation = json.loads(line)
        value = operation["value"]
        if operation["key"] == "header" and value.get("parentCommit", head) != head:
            request.refuse(412, "A commit has happened since. Please refresh and try again.")
            return
        if operation["key"] == "file":
            files[value["path"]] = base64.b64decode(value["content"])
        elif operation["key"] == "lfsFile":
            files[value["path"]] = request.hub.storage[value["oid"]]
        elif operation["key"] == "deletedFile":
            del files[value["path"]]
    oid = repository.commit(files)
    request.json({"commitOid": oid, "commitUrl": f"{request.hub.url}/{name}/commit/{oid}", "hookOutput": ""})


def tag(request: Request, name: str, revision: str) -> None:
    found = request.open(name, revision, write=True)
    if found is None:
        return
    wanted = json.loads(request.body)["tag"]
    if wanted in found[0].tags:
        request.refuse(409, "Tag already exists")
        return
    found[0].tags[wanted] = found[1]
    request.json({})


def resolve(request: Request, name: str, revision: str, path: str) -> None:
    found = request.open(name, revision)
    if found is None:
        return
    repository, oid = found
    data = repository.commits[oid].get(path)
    if data is None:
        request.refuse(404, "Entry not found", "EntryNotFound")
        return
    if path.endswith(LARGE):
        digest = sha256(data).hexdigest()
        request.hub.storage[digest] = data
        storage = request.hub.url.replace("127.0.0.1", "localhost")
        request.answer(302, b"", Location=f"{storage}/storage/{digest}", X_Repo_Commit=oid,
                       X_Linked_Etag=f'"{digest}"', X_Linked_Size=str(len(data)))  # fmt: skip
        return
    serve(request, data, ETag=f'"{git_blob(data)}"', X_Repo_Commit=oid)


def download(request: Request, oid: str) -> None:
    if request.headers.get("Authorization"):
        request.hub.leaked.append(request.path)
    serve(request, request.hub.storage[oid], ETag=f'"{oid}"')


def serve(request: Request, data: bytes, **headers: str) -> None:
    """The bytes, or those of a range from somewhere to the end."""
    found = re.fullmatch(r"bytes=(\d+)-", request.headers.get("Range", ""))
    if found is None:
        request.answer(200, data, **headers)
        return
    start = int(found[1])
    request.answer(206, data[start:], Content_Range=f"bytes {start}-{len(data) - 1}/{len(data)}", **headers)


NAMED = r"([^/]+/[^/]+?)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("POST", "/api/repos/create", create),
    ("POST", "/api/validate-yaml", validate),
    ("GET", rf"/api/models/{NAMED}/refs", refs),
    ("GET", rf"/api/models/{NAMED}(?:/revision/(.+))?", info),
    ("POST", rf"/api/models/{NAMED}/preupload/(.+)", preupload),
    ("POST", rf"/api/models/{NAMED}/commit/(.+)", commit),
    ("POST", rf"/api/models/{NAMED}/tag/(.+)", tag),
    ("POST", rf"/{NAMED}\.git/info/lfs/objects/batch", batch),
    ("PUT", r"/storage/(\w+)", upload),
    ("GET HEAD", r"/storage/(\w+)", download),
    ("GET HEAD", rf"/{NAMED}/resolve/([^/]+)/(.+)", resolve),
]


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    """A running server."""
    hub = Hub()
    handler = type("Bound", (Request,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield hub
        finally:
            server.shutdown()
