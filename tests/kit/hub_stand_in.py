"""A server of this machine that speaks as much of the Hugging Face hub's HTTP API as a push and a
pull need.

It keeps repositories as git does: commits of files, a branch, tags; safetensors and pictures go to
large file storage, under another host name, as on the real hub.  ``faults`` are asked before every
request and may answer in its place."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.kit.local_server import QuietHandler, answer, served

TOKEN = "hf_of_the_tests"
LARGE = (".safetensors", ".png", ".bin", ".pkl")
NAMED = r"/([^/]+/[^/]+?)"
ROUTES: list[tuple[str, str, str]] = [
    ("POST", "/api/repos/create", "create"),
    ("POST", "/api/validate-yaml", "validate"),
    ("GET", rf"/api/models{NAMED}/refs", "refs"),
    ("GET", rf"/api/models{NAMED}(?:/revision/(.+))?", "info"),
    ("GET", rf"/api/models{NAMED}/tree/([^/]+)", "tree"),
    ("POST", rf"/api/models{NAMED}/preupload/(.+)", "preupload"),
    ("POST", rf"/api/models{NAMED}/commit/(.+)", "commit"),
    ("POST", rf"/api/models{NAMED}/tag/(.+)", "tag"),
    ("POST", rf"{NAMED}\.git/info/lfs/objects/batch", "batch"),
    ("PUT", r"/storage/(\w+)", "upload"),
    ("GET HEAD", r"/storage/(\w+)", "download"),
    ("GET HEAD", rf"{NAMED}/resolve/([^/]+)/(.+)", "resolve"),
]


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
        oid = sha1(f"{len(self.commits)} {sorted(files.items())}".encode()).hexdigest()
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

    def repository(
        self, name: str, files: dict[str, bytes] | None = None, *, tag: str | None = None
    ) -> Repository:
        made = self.repositories.setdefault(name, Repository())
        oid = made.commit({".gitattributes": b"*.safetensors filter=lfs\n", **(files or {})})
        if tag is not None:
            made.tags[tag] = oid
        return made

    def count(self, pattern: str) -> int:
        return sum(bool(re.search(pattern, request)) for request in self.requests)


class Refused(Exception):
    """The request has been answered with an error."""


class Request(QuietHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self.route = unquote(urlsplit(self.path).path)
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.requests.append(f"{self.command} {self.route}")
        self.trusted = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if any(fault(self) for fault in list(self.hub.faults)):
            return
        for methods, pattern, handler in ROUTES:
            if self.command in methods and (found := re.fullmatch(pattern, self.route)):
                with suppress(Refused):
                    getattr(self, handler)(*found.groups())
                return
        self.refuse(404, "no such route")

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(
        self, status: int, body: bytes, kind: str = "application/octet-stream", **headers: str
    ) -> None:
        answer(self, status, body, kind, **headers)

    def json(self, document: Any, status: int = 200) -> None:
        self.answer(status, json.dumps(document).encode(), "application/json")

    def refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer(status, json.dumps({"error": message}).encode(), "application/json", **headers)

    def open(
        self, name: str, revision: str = "main", *, write: bool = False
    ) -> tuple[Repository, str]:
        """The repository and the commit.  Raises Refused, having answered."""
        repository = self.hub.repositories.get(name)
        commit = repository and repository.find(revision)
        if repository is None or (repository.private and not self.trusted):
            self.refuse(404 if self.trusted else 401, "Repository not found", "RepoNotFound")
        elif write and not self.trusted:
            self.refuse(401, "Invalid credentials")
        elif commit is None:
            self.refuse(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        else:
            return repository, commit
        raise Refused

    def create(self) -> None:
        wanted = json.loads(self.body)
        name = f"{wanted['organization']}/{wanted['name']}"
        if not self.trusted:
            self.refuse(401, "Invalid username or password.")
        elif name in self.hub.repositories:
            self.refuse(409, "You already created this model repo")
        else:
            self.hub.repository(name).private = wanted.get("visibility") == "private"
            self.json({"url": f"{self.hub.url}/{name}"})

    def info(self, name: str, revision: str | None) -> None:
        repository, commit = self.open(name, revision or "main")
        siblings: list[dict[str, Any]] = []
        for path, data in repository.commits[commit].items():
            siblings.append({"rfilename": path})
            if "blobs" in parse_qs(urlsplit(self.path).query):
                siblings[-1] |= {"size": len(data), "blobId": git_blob(data)}
                if path.endswith(LARGE):
                    siblings[-1]["lfs"] = {
                        "size": len(data),
                        "sha256": sha256(data).hexdigest(),
                        "pointerSize": 130,
                    }
        self.json(
            {
                "id": name,
                "modelId": name,
                "sha": commit,
                "private": repository.private,
                "siblings": siblings,
            }
        )

    def tree(self, name: str, revision: str) -> None:
        repository, commit = self.open(name, revision)
        files: list[dict[str, Any]] = []
        for path, data in repository.commits[commit].items():
            files.append({"type": "file", "path": path, "size": len(data), "oid": git_blob(data)})
            if path.endswith(LARGE):
                files[-1]["lfs"] = {
                    "size": len(data),
                    "oid": sha256(data).hexdigest(),
                    "pointerSize": 130,
                }
        self.json(files)

    def refs(self, name: str) -> None:
        repository, head = self.open(name)
        tags = [
            {"name": t, "ref": f"refs/tags/{t}", "targetCommit": oid}
            for t, oid in repository.tags.items()
        ]
        branch = {"name": "main", "ref": "refs/heads/main", "targetCommit": head}
        self.json({"branches": [branch], "converts": [], "tags": tags})

    def validate(self) -> None:
        """``base_model`` in the front matter is no path."""
        content = json.loads(self.body)["content"]
        metadata = yaml.safe_load(content.split("---\n")[1]) if content.startswith("---\n") else {}
        model = metadata.get("base_model", "a/b")
        said = (
            ""
            if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model)
            else f'"base_model" with value "{model}" is not valid'
        )
        self.json(
            {"errors": [{"message": said}] if said else [], "warnings": []}, 400 if said else 200
        )

    def preupload(self, name: str, revision: str) -> None:
        repository, head = self.open(name, revision, write=True)
        there, files = repository.commits[head], []
        for path in (wanted["path"] for wanted in json.loads(self.body)["files"]):
            large, data = path.endswith(LARGE), there.get(path)
            oid = None if data is None else sha256(data).hexdigest() if large else git_blob(data)
            mode = "lfs" if large else "regular"
            files.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.json({"files": files})

    def batch(self, name: str) -> None:
        self.open(name, write=True)
        objects = []
        for wanted in json.loads(self.body)["objects"]:
            objects.append({"oid": wanted["oid"], "size": wanted["size"]})
            if wanted["oid"] not in self.hub.storage:
                objects[-1]["actions"] = {"upload": {"href": self.stored(wanted["oid"])}}
        self.json({"transfer": "basic", "objects": objects})

    def stored(self, oid: str) -> str:
        return f"{self.hub.url.replace('127.0.0.1', 'localhost')}/storage/{oid}"

    def upload(self, oid: str) -> None:
        if "Transfer-Encoding" in self.headers:
            while size := int(self.rfile.readline(), 16):
                self.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if sha256(self.body).hexdigest() != oid:
            self.refuse(400, "other bytes than announced")
            return
        self.hub.storage[oid] = self.body
        self.answer(200, b"")

    def commit(self, name: str, revision: str) -> None:
        repository, head = self.open(name, revision, write=True)
        files = dict(repository.commits[head])
        for operation in map(json.loads, self.body.splitlines()):
            value = operation["value"]
            if operation["key"] == "header" and value.get("parentCommit", head) != head:
                self.refuse(412, "A commit has happened since. Please refresh and try again.")
                return
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.hub.storage[value["oid"]]
            elif operation["key"] == "deletedFile":
                del files[value["path"]]
        oid = repository.commit(files)
        self.json(
            {"commitOid": oid, "commitUrl": f"{self.hub.url}/{name}/commit/{oid}", "hookOutput": ""}
        )

    def tag(self, name: str, revision: str) -> None:
        repository, commit = self.open(name, revision, write=True)
        wanted = json.loads(self.body)["tag"]
        if wanted in repository.tags:
            self.refuse(409, "Tag already exists")
            return
        repository.tags[wanted] = commit
        self.json({})

    def resolve(self, name: str, revision: str, path: str) -> None:
        repository, commit = self.open(name, revision)
        data = repository.commits[commit].get(path)
        if data is None:
            self.refuse(404, "Entry not found", "EntryNotFound")
        elif path.endswith(LARGE):
            digest = sha256(data).hexdigest()
            self.hub.storage[digest] = data
            self.answer(
                302,
                b"",
                Location=self.stored(digest),
                X_Repo_Commit=commit,
                X_Linked_Etag=f'"{digest}"',
                X_Linked_Size=str(len(data)),
            )
        else:
            self.serve(data, ETag=f'"{git_blob(data)}"', X_Repo_Commit=commit)

    def download(self, oid: str) -> None:
        if self.headers.get("Authorization"):
            self.hub.leaked.append(self.path)
        self.serve(self.hub.storage[oid], ETag=f'"{oid}"')

    def serve(self, data: bytes, **headers: str) -> None:
        """The bytes, or those of a range from somewhere to the end."""
        found = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(found[1]) if found else 0
        if found:
            headers["Content_Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206 if found else 200, data[start:], **headers)


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    hub = Hub()
    with served(type("Bound", (Request,), {"hub": hub})) as address:
        hub.url = f"http://{address}"
        yield hub
