"""What huggingface_hub's and the network's errors mean, in this project's words and classes."""

from __future__ import annotations

import errno
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from parallel_synthesis.errors import ConfigError, ParallelSynthesisError, RefusedError, StorageError
from parallel_synthesis.provenance.hub_names import SCHEME, folder_hint

_LONGEST = 200  # characters of a foreign error's first line
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a path of the cache does not allow. ENOENT is not among them: libraries look for files and go on without.
_UNUSABLE = (
    errno.EACCES,
    errno.EEXIST,
    errno.EIO,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. what: "checkpoint" or "model". refused: the class of errors the input is to blame for.
    known: the local cache has something of the repository."""

    given: str
    repository: str
    revision: str | None
    what: str
    refused: type[RefusedError]
    known: bool = False

    def __str__(self) -> str:
        """As it was given, and the revision that it means."""
        return self.given if self.revision is not None else f"{self.given} (revision main)"

    @property
    def both(self) -> str:
        """The start of a message for what may as well have been meant as a path."""
        return f"{self.given}: no such directory, and as a Hub id:"

    @property
    def is_bare(self) -> bool:
        """Without hf://, so that a path may have been meant."""
        return not self.given.startswith(SCHEME)

    @property
    def may_be_path(self) -> bool:
        """Nothing has shown yet that a repository was meant: a mistyped path is the likelier reading, and the input's
        own fault."""
        return self.is_bare and not self.known

    @property
    def download(self) -> str:
        """The command that fetches everything."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repository}{revision}"


def check_endpoint() -> None:
    """ConfigError for an HF_ENDPOINT that is no address: huggingface_hub fails on some while it is imported."""
    endpoint = os.environ.get("HF_ENDPOINT", "")
    if not endpoint:
        return
    try:
        parts = urlsplit(endpoint)
        why = (
            ""
            if parts.scheme in ("http", "https") and parts.hostname
            else "no http:// or https:// and a host"
        )
        _ = parts.port  # looked at only when asked for
    except ValueError as error:
        why = str(error)
    if why:
        raise ConfigError(
            [
                f"HF_ENDPOINT = {endpoint}: {why}; expected the address of a Hub, as https://huggingface.co, or unset it"
            ]
        )


def offline() -> bool:
    """HF_HUB_OFFLINE is set, as huggingface_hub has read it."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def transport() -> tuple[type[Exception], ...]:
    """The error classes of the HTTP library below huggingface_hub, which has been requests, httpx and httpx2.

    Those of requests are OSErrors. Only what huggingface_hub itself has loaded can raise anything.
    """
    modules = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return (OSError, *(module.HTTPError for module in modules))


@contextmanager
def explained(
    request: Request, hint: Callable[[], str | None] | None, *, fetching: bool = False, answer: bool = False
) -> Iterator[None]:
    """Turns what goes wrong inside into an error of ours. fetching: the files, after the Hub has answered. answer: the
    Hub's API is asked, whose answer huggingface_hub takes apart without looking at it first."""
    from huggingface_hub.errors import HFValidationError

    # hf_xet, which transfers big files, raises plain RuntimeErrors; ValueErrors: answers that are no JSON.
    known: tuple[type[Exception], ...] = (HFValidationError, RuntimeError, ValueError, *transport())
    if answer:
        known = (*known, TypeError, LookupError, AttributeError)
    try:
        yield
    except known as error:
        raise explain(error, request, hint=hint, fetching=fetching, answer=answer) from error


def explain(
    error: BaseException,
    request: Request,
    *,
    hint: Callable[[], str | None] | None = None,
    fetching: bool = False,
    answer: bool = False,
) -> ParallelSynthesisError:
    """The error of ours that stands for `error`, judged by the first of its causes that says more than itself."""
    told = _refusal(error, request)
    if told is not None:
        return request.refused(told)
    if offline():
        return not_cached(request)
    system = [cause for cause in chain(error) if isinstance(cause, OSError)]
    if any(cause.errno in _FULL for cause in system):
        return StorageError(
            f"{request}: no space left for it in the Hub cache; free some, or let HF_HOME name another disk"
        )
    for cause in system:
        if cause.errno in _UNUSABLE and cause.filename is not None:
            return StorageError(
                f"{request}: the local Hub cache can not be used: {os.fsdecode(cause.filename)}: {cause.strerror}; mend "
                f"or remove it, or let HF_HOME name another directory"
            )
    garbled = _garbled(error, answer=answer)
    if garbled is not None:
        return no_hub(request, garbled)
    if fetching:
        return StorageError(half(request, _root(error)))
    status = _status(error)
    found = hint() if hint is not None and _is_no_answer(status) else None
    also = "" if found is None else f"; {found}"
    if status is not None:
        return _unclear(
            request, f"the Hub at {_endpoint()} answered {status};", f"{_by_status(status)}{also}"
        )
    return _unclear(
        request,
        f"the Hub at {_endpoint()} can not be reached: {_root(error)};",
        f"check the network, proxy and HF_ENDPOINT and run the same call again{also}",
    )


def is_unanswered(error: StorageError) -> bool:
    """Of an error of `explained`: the Hub could not be reached, or had no answer to give."""
    return error.__cause__ is not None and _is_no_answer(_status(error.__cause__))


def _is_no_answer(status: int | None) -> bool:
    return status is None or status == 429 or status >= 500


def no_hub(request: Request, why: str) -> ParallelSynthesisError:
    """The error for an endpoint that answers something else than a Hub does."""
    return _unclear(
        request,
        f"what {_endpoint()} answers is no answer of a Hub: {why};",
        "check HF_ENDPOINT, and whether a proxy or a login page of the network answers in its place",
    )


def _garbled(error: BaseException, *, answer: bool) -> str | None:
    """What is wrong with the answer that `error` comes from, None where there was none. answer: of the API."""
    from huggingface_hub.errors import FileMetadataError

    causes = list(chain(error))
    if any(isinstance(cause, FileMetadataError) for cause in causes):
        return "it names no commit or hash of a file"
    if answer and any(isinstance(cause, json.JSONDecodeError | UnicodeDecodeError) for cause in causes):
        return "it is no JSON"
    if answer and not isinstance(error, (RuntimeError, *transport())):
        return "it is JSON, but describes no repository"
    return None


def not_cached(request: Request, there: str = "") -> ParallelSynthesisError:
    """The error for what is not in the cache when the Hub must not be asked. there: what the cache has instead."""
    return _unclear(
        request,
        f"not in the local Hub cache{there}, and the Hub is not asked because HF_HUB_OFFLINE is set;",
        f"unset it, or fetch it where there is a network by `{request.download}`"
        f"{folder_hint(request.repository, request.revision)}",
    )


def _unclear(request: Request, what: str, then: str) -> ParallelSynthesisError:
    """The error where the Hub has not said whether there is such a repository."""
    if request.may_be_path:
        return request.refused(f"{request.both} {what} check the path; if a repository is meant, {then}")
    return StorageError(f"{request}: {what} {then}")


def is_of_hub(error: BaseException) -> bool:
    """Whether an error of another library comes from asking the Hub, or from not being allowed to."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    kinds = (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled)
    return any(isinstance(cause, kinds) for cause in chain(error))


def half(request: Request, why: str) -> str:
    """The message for a download that did not come to its end."""
    return (
        f"{request}: the download was cut off: {why}. Expected the whole {request.what}; nothing of it is used. Run the "
        f"same call again: files that are whole are kept"
    )


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error and what caused it, outermost first."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _refusal(error: BaseException, request: Request) -> str | None:
    """The message where the request itself must change, None for everything else."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    causes = list(chain(error))
    start = request.both if request.is_bare else f"{request}:"
    if any(isinstance(cause, GatedRepoError) for cause in causes):  # before its base class
        return (
            f"{request}: the repository {request.repository} is gated; accept its terms at "
            f"{_endpoint()}/{request.repository}, then log in by `hf auth login` or set HF_TOKEN"
        )
    if any(isinstance(cause, RepositoryNotFoundError) for cause in causes):
        return (
            f"{start} no such repository at {_endpoint()}, or a private one; check the spelling, or log in by "
            f"`hf auth login` or HF_TOKEN"
        )
    if any(isinstance(cause, RevisionNotFoundError) for cause in causes):
        return (
            f"{request}: the repository {request.repository} has no revision {request.revision or 'main'}; expected a "
            f"branch, a tag or a full commit: see {_endpoint()}/{request.repository}/tree/main{folder_hint(request.repository, request.revision)}"
        )
    if any(isinstance(cause, HFValidationError) for cause in causes):
        return f"{start} {_first_line(error).rstrip('.')}; expected OWNER/NAME as on the Hub, or a path that exists"
    return None


def _status(error: BaseException) -> int | None:
    for cause in chain(error):
        response = getattr(cause, "response", None)
        if response is not None:
            return int(response.status_code)
    return None


def _by_status(status: int) -> str:
    if status in (401, 403):
        return "check the token (`hf auth whoami`, HF_TOKEN) and what it may read"
    if status == 429:
        return "too many requests: wait, or log in by `hf auth login`"
    return "try again later, and check HF_ENDPOINT"


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)


def _root(error: BaseException) -> str:
    """What the innermost cause says: the HTTP libraries wrap "Connection refused" in several layers."""
    return _first_line(list(chain(error))[-1])


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:_LONGEST]
