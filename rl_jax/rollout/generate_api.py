"""The words of POST /inference/v1/generate: a Request becomes a body, a reply becomes a Completion or is refused.

Token ids in, token ids out (step 5 of docs/walk.md). A reply is believed only if every part of it agrees with every
other and with what was asked: a log-probability that is missing, or a version that nobody published, would be trained
without a trace. Pure functions; knows no connection.
"""

import base64
import binascii
import io
import itertools
from collections.abc import Container, Mapping, Sequence
from typing import TypeVar, cast

import numpy as np

from rl_jax.sampler import Completion, Request
from rl_jax.types import FinishReason

MISSING_LOGPROB = -9999.0
"""What vLLM writes for a log-probability that is NaN, minus infinity or missing."""
ROUTE_DTYPES = ("uint8", "uint16", "int32")
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
ID_PREFIX = "generate-tokens-"
"""vLLM puts it before the id of a request; aborts name the whole."""

Json = Mapping[str, object]
T = TypeVar("T")


class BadReply(RuntimeError):
    """A server answered what cannot be true; its weights and its labels are in doubt."""


def generate_body(request: Request, request_id: str, version: int) -> dict[str, object]:
    """Return the body that asks a server at policy `version` for one completion.

    The salt keeps prefixes apart that were cached under other versions. `ignore_eos`: what ends a turn is what the
    request says, not what a generation_config.json says.
    """
    params = request.params
    return {
        "request_id": request_id,
        "token_ids": request.tokens_T.tolist(),
        "cache_salt": str(version),
        "stream": False,
        "sampling_params": {
            "n": 1,
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "stop_token_ids": list(params.stop_token_ids),
            "stop": list(params.stop),
            "seed": params.seed,
            "ignore_eos": True,
            "logprobs": 0,
            "skip_special_tokens": False,
        },
    }


def score_body(tokens_T: np.ndarray, request_id: str, version: int) -> dict[str, object]:
    """Return the body that asks for the log-probability of each token of a prompt."""
    sampling = {"n": 1, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "ignore_eos": True}
    return {
        "request_id": request_id,
        "token_ids": tokens_T.tolist(),
        "cache_salt": str(version),
        "stream": False,
        "sampling_params": sampling,
    }


def read_completion(reply: object, request: Request, known_versions: Container[int], oldest: int) -> Completion:
    """Return the completion of a reply.

    Args:
        known_versions: policy versions that were ever given to this server.
        oldest: the version that it had acknowledged when it was asked; nothing older may come back.
    Raises:
        BadReply: naming what is wrong, with the value.
    """
    where = f"request {request.request_id}"
    body = _is(reply, dict, f"{where}: reply")
    choice = _only_choice(body, where)
    finish = FINISH.get(_is(choice.get("finish_reason"), str, f"{where}: finish_reason"))
    if finish is None:
        raise BadReply(f"{where}: finish_reason={choice['finish_reason']!r}: expected one of {', '.join(FINISH)}")
    tokens_T = _token_ids(choice.get("token_ids"), f"{where}: token_ids")
    if len(tokens_T) > request.params.max_tokens:
        raise BadReply(f"{where}: {len(tokens_T)} tokens: asked for at most {request.params.max_tokens}")
    if finish is FinishReason.LENGTH and not len(tokens_T):
        raise BadReply(f"{where}: finish_reason='length' without a token")
    return Completion(
        tokens_T=tokens_T,
        logprobs_T=_logprobs(choice.get("logprobs"), tokens_T, where),
        versions_T=_versions(choice.get("weight_versions"), len(tokens_T), known_versions, oldest, where),
        finish=finish,
        num_cached_tokens=_num_cached(body),
        routed_experts_TLA=_routes(choice, request, len(tokens_T), where),
    )


def read_scores(reply: object, tokens_T: np.ndarray, where: str) -> np.ndarray:
    """Return float32 [T]: log-probability of each token of the prompt given those before it, 0 at index 0.

    Raises:
        BadReply: an entry is missing, or no number.
    """
    entries = _is(_is(reply, dict, f"{where}: reply").get("prompt_logprobs"), list, f"{where}: prompt_logprobs")
    if len(entries) != len(tokens_T):
        raise BadReply(f"{where}: {len(entries)} prompt_logprobs for {len(tokens_T)} tokens")
    scores_T = np.zeros(len(tokens_T), np.float32)
    for t in range(1, len(tokens_T)):
        entry = _is(entries[t], dict, f"{where}: prompt_logprobs[{t}]").get(str(tokens_T[t]))
        scores_T[t] = _logprob(
            _is(entry, dict, f"{where}: prompt_logprobs[{t}] of {tokens_T[t]}"), f"{where}: token {t}"
        )
    return scores_T


def _only_choice(body: Json, where: str) -> Json:
    choices = _is(body.get("choices"), list, f"{where}: choices")
    if len(choices) != 1:
        raise BadReply(f"{where}: {len(choices)} choices: asked for 1")
    return _is(choices[0], dict, f"{where}: choices[0]")


def _token_ids(value: object, where: str) -> np.ndarray:
    ids = _is(value, list, where)
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise BadReply(f"{where}={ids!r:.80}: expected ids from 0 on")
    return np.array(ids, np.int32)


def _logprobs(value: object, tokens_T: np.ndarray, where: str) -> np.ndarray:
    """Return float32 [T] of entries that name the very tokens."""
    content = _is(_is(value, dict, f"{where}: logprobs").get("content"), list, f"{where}: logprobs.content")
    if len(content) != len(tokens_T):
        raise BadReply(f"{where}: {len(content)} log-probabilities for {len(tokens_T)} tokens")
    logprobs_T = np.zeros(len(tokens_T), np.float32)
    for t, entry in enumerate(content):
        entry = _is(entry, dict, f"{where}: logprobs.content[{t}]")
        if entry.get("token_id") != tokens_T[t]:
            raise BadReply(f"{where}: log-probability {t} is of token {entry.get('token_id')!r}, not {tokens_T[t]}")
        logprobs_T[t] = _logprob(entry, f"{where}: token {t}")
    return logprobs_T


def _logprob(entry: Json, where: str) -> float:
    value = entry.get("logprob")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not MISSING_LOGPROB < cast(float, value) <= 1e-4:  # NaN fails too; rounding may pass 0
        raise BadReply(f"{where}: logprob={value!r}: expected a number in ({MISSING_LOGPROB:.0f}, 0]; NaN weights?")
    if "rank" in entry and entry["rank"] is None:
        raise BadReply(f"{where}: logprob={value!r} without a rank: the server made it up")
    return cast(float, value)


def _versions(value: object, num_tokens: int, known_versions: Container[int], oldest: int, where: str) -> np.ndarray:
    """Return int32 [T] from spans that cover every token once, in order, with versions that never fall."""
    spans = _is(value, list, f"{where}: weight_versions") if num_tokens else []
    versions_T = np.zeros(num_tokens, np.int32)
    end, last = 0, oldest
    for span in spans:
        span = _is(span, dict, f"{where}: weight_versions")
        version, start = _version(span.get("version"), where), span.get("start")
        if version not in known_versions:
            raise BadReply(f"{where}: version {version} was never published to this server")
        if version < last:
            raise BadReply(f"{where}: version {version} after {last}: the server sampled from old weights")
        stop = _is(span.get("end"), int, f"{where}: end of a span")
        if start != end or not end < stop <= num_tokens:
            raise BadReply(f"{where}: weight_versions={value!r:.200}: expected spans that cover 0..{num_tokens}")
        versions_T[end:stop] = version
        end, last = stop, version
    if end != num_tokens:
        raise BadReply(f"{where}: weight_versions={value!r:.200}: expected spans that cover 0..{num_tokens}")
    return versions_T


def _version(value: object, where: str) -> int:
    if not isinstance(value, str) or not value.isdecimal():
        raise BadReply(f"{where}: weight version {value!r}: expected an integer that the run published")
    return int(value)


def _num_cached(body: Json) -> int:
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    return int(details.get("cached_tokens") or 0) if isinstance(details, dict) else 0


def _routes(choice: Json, request: Request, num_tokens: int, where: str) -> np.ndarray | None:
    """Return uint16 [prompt + completion - 1, L, A]; None if it was not asked for, or the server keeps none."""
    value = choice.get("routed_experts")
    if value is None or not request.params.return_routed_experts:
        return None
    return read_routes(_is(value, str, f"{where}: routed_experts"), len(request.tokens_T) + num_tokens - 1, where)


def read_routes(payload: str, num_rows: int, where: str) -> np.ndarray:
    """Decode base64 of a .npy file, [rows, layers, chosen experts], one to four bytes an expert, to uint16.

    Raises:
        BadReply: it is none, or has another number of rows.
    """
    try:
        routes_TLA = np.load(io.BytesIO(base64.b64decode(payload, validate=True)), allow_pickle=False)
    except (binascii.Error, ValueError, EOFError, OSError) as error:
        raise BadReply(f"{where}: routed_experts: expected base64 of a .npy file ({error})") from error
    if routes_TLA.dtype.name not in ROUTE_DTYPES or routes_TLA.ndim != 3 or len(routes_TLA) != num_rows:
        raise BadReply(
            f"{where}: routed_experts {routes_TLA.dtype} {routes_TLA.shape}: expected [{num_rows}, layers, experts of a "
            f"token] of {', '.join(ROUTE_DTYPES)}"
        )
    if routes_TLA.size and not 0 <= int(routes_TLA.min()) <= int(routes_TLA.max()) < 2**16:
        raise BadReply(f"{where}: routed_experts hold {int(routes_TLA.min())}..{int(routes_TLA.max())}: not experts")
    return routes_TLA.astype(np.uint16)


def _is(value: object, kind: type[T], where: str) -> T:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise BadReply(f"{where}={value!r:.120}: expected {kind.__name__}")
    return value


def published(versions: Sequence[int]) -> list[str]:
    """Return versions as servers write them, for messages."""
    return [str(version) for version in itertools.islice(versions, 8)]
