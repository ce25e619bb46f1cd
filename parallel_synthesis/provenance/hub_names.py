"""Which texts name a Hub repository, which a local path, and what to write instead of the near misses (no network)."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from parallel_synthesis.errors import CheckpointError

SCHEME = "hf://"
_NAME = r"[A-Za-z0-9][\w.-]*"
_PART = r"\w[\w.+-]*"
_ID = re.compile(rf"(?:{SCHEME})?(?P<id>{_NAME}/{_NAME})(?:@(?P<revision>{_PART}(?:/{_PART})*))?", re.ASCII)
# A branch main/x can not be beside the branch main, which every repository has; a commit holds no slash.
_FOLDER = re.compile(
    rf"(?:{SCHEME})?(?P<id>{_NAME}/{_NAME})"
    rf"(?:@(?P<first>main|[0-9a-f]{{40}}))?/(?P<folder>{_PART}(?:/{_PART})*)(?:@(?P<last>{_PART}(?:/{_PART})*))?",
    re.ASCII,
)
_OTHER_SCHEME = re.compile(r"(?:hf|huggingface):/*(?P<rest>.*)", re.IGNORECASE | re.DOTALL)
_SITE = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<rest>.*)", re.IGNORECASE | re.DOTALL
)
_ADDRESS = re.compile(r"[A-Za-z][\w+.-]*://", re.ASCII)
# OWNER/NAME/VIEW/REVISION[/PATH] on the site
_VIEWS = ("tree", "blob", "resolve", "raw", "commit", "commits")
_OTHER_KINDS = ("datasets", "spaces", "collections", "papers", "docs", "buckets")
_FILES = (".pt", ".safetensors", ".json", ".md", ".bin", ".gguf", ".log")
_FORM = f"expected {SCHEME}OWNER/NAME or {SCHEME}OWNER/NAME@REVISION, a branch, a tag or a commit"


def hub_id(given: str) -> tuple[str, str | None] | None:
    """(owner/name, revision) of a text that names a Hub repository; None for a text that means a local path.

    hf:// never means a path. Without it a path is meant when there is one of the name, or one of the owner's name: in
    a directory with runs/, runs/nope is a slip and no repository. CheckpointError for what is neither: a text that
    begins with hf:// and goes on otherwise, a folder inside a repository, an address.
    """
    if not given.startswith(SCHEME) and _is_local(given):
        return None
    match = _ID.fullmatch(given)
    folder = folder_inside(given)
    if match is not None and folder is None:
        return match["id"], match["revision"]
    if given.startswith(SCHEME):
        raise CheckpointError(
            f"{given}: {_FORM}; {folder or 'a folder inside a repository can not be named'}"
        )
    if match is not None:  # OWNER/NAME@main/FOLDER; without a revision it is a path like any other
        raise CheckpointError(f"{given}: no such directory, and as a Hub id: {folder}")
    instead = right_form(given)
    if instead is not None:
        raise CheckpointError(f"{given}: {instead}")
    return None


def is_form(given: str) -> bool:
    """The text has the form of a Hub id, whatever there is of the name."""
    return _ID.fullmatch(given) is not None


def right_form(given: str) -> str | None:
    """What to say of an address or of another spelling of hf://; None for any other text."""
    other = _OTHER_SCHEME.fullmatch(given)
    if other is not None and not given.startswith(SCHEME):
        rest = other["rest"]
        return f"a Hub repository is named {SCHEME}{rest}" if _ID.fullmatch(rest) else _FORM
    site = _SITE.fullmatch(given)
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    if site is not None:
        return _of_site(site["rest"])
    if endpoint and given.startswith(f"{endpoint}/"):
        return _of_site(given.removeprefix(f"{endpoint}/"))
    if _ADDRESS.match(given) and not given.startswith(SCHEME):
        return f"addresses are not read; expected a local path, or a Hub repository as {SCHEME}OWNER/NAME"
    return None


def folder_inside(given: str) -> str | None:
    """What to do about a text that names a folder or file of a repository; None where it does not."""
    match = _FOLDER.fullmatch(given)
    if match is None or (match["first"] and match["last"]):
        return None
    if match["first"] is None and not given.startswith(SCHEME):
        return None  # a/b/c is a path
    return _folder(match["id"], match["first"] or match["last"], match["folder"])


def folder_hint(repository: str, revision: str | None) -> str:
    """For messages about a revision that is not there: v2/runs/x may have been meant as a folder of v2."""
    first, slash, folder = (revision or "").partition("/")
    if not slash or first == "refs":
        return ""
    return f". If {folder} is a folder of {first}: {_folder(repository, first, folder)}"


def _folder(repository: str, revision: str | None, folder: str) -> str:
    at, option = (f"@{revision}", f" --revision {revision}") if revision else ("", "")
    if folder.endswith(_FILES):
        return f"a file inside a repository can not be named; name the repository: {SCHEME}{repository}{at}"
    return (
        f"a folder inside a repository can not be named; download it by `hf download {repository}{option} --include "
        f"'{folder}/*' --local-dir DIR` and name DIR/{folder}"
    )


def _of_site(rest: str) -> str:
    """What names the repository of a page of the Hub's site; rest: the address behind the host."""
    parts = [part for part in re.split(r"[?#]", rest, maxsplit=1)[0].split("/") if part]
    if parts and parts[0] in _OTHER_KINDS:
        return f"the address is of no model repository; {_FORM}"
    repository = "/".join(parts[:2]).removesuffix(".git")
    if not re.fullmatch(rf"{_NAME}/{_NAME}", repository, re.ASCII):
        return _FORM
    revision, folder = None, ""
    if len(parts) > 3 and parts[2] in _VIEWS:
        revision, folder = unquote(parts[3]), unquote("/".join(parts[4:]))
    named = f"{SCHEME}{repository}" + (f"@{revision}" if revision else "")
    more = f"; {_folder(repository, revision, folder)}" if folder and not folder.endswith(_FILES) else ""
    return f"a Hub repository is not named by its address, but so: {named}{more}"


def _is_local(given: str) -> bool:
    """There is a path of the name, of RUN in RUN@NAME, or of the first folder of it."""
    return any(map(_exists, {given, given.partition("@")[0], given.partition("/")[0]}))


def _exists(path: str) -> bool:
    try:
        os.lstat(path)
    except PermissionError:
        return True  # it can not be looked at: whoever opens it says so
    except (OSError, ValueError):  # not there; too long; a NUL
        return False
    return True
