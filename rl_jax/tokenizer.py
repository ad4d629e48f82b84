"""Text <-> token ids, and chats -> token ids through the model's own template (step 4 of docs/walk.md).

Token in, token out: prompts and replies of an environment are encoded once; what the policy sampled is decoded for
rewards and people, never encoded again. Knows Hugging Face's tokenizer files, no model and no JAX.

Two promises beside those of Hugging Face:
- Text is data. A special token spelled out in a message or a plain prompt is encoded as its letters; only the template
  writes special tokens. Everything else is encoded in one piece, exactly as Hugging Face and vLLM do.
- A later turn only appends: `bridge_ids` gives the tokens that follow a finished turn, or None where the template would
  rewrite what came before.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from rl_jax.chat_template import ChatTemplate, Message

Chat: TypeAlias = str | Sequence[Message]
"""A user message, or a list of messages {"role", "content"}."""

BYTE_LEVEL_SPECIAL_TOKENS = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>")
BYTE_LEVEL_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message.role == 'assistant' -%}{{ '<|assistant|>' + message.content + '<|end|>' }}"
    "{%- else -%}{{ '<|user|>' + message.content }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)

# Around a special token spelled in a message: Unicode noncharacters, which no text holds and no template strips.
_LITERAL_OPEN, _LITERAL_CLOSE = "\ufdd0", "\ufdd1"
_REPLACEMENT = "\ufffd"  # what bytes that are no complete character decode to


class Tokenizer:
    """A `tokenizers.Tokenizer` with the chat template and the special tokens of its model.

    Args:
        backend: the tokenizer; used as it is, so let nobody else change it.
        chat_template: Jinja source, or None for a base model: then prompts are plain text.
        config: content of tokenizer_config.json (bos_token, eos_token, pad_token ...).
        generation_config: content of generation_config.json; its eos_token_id may be one id or many.
        eos_token_ids: more ids that end a completion.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: str | None = None,
        config: Mapping[str, object] | None = None,
        generation_config: Mapping[str, object] | None = None,
        eos_token_ids: Iterable[int] = (),
    ):
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._config = dict(config or {})
        self._generation_config = dict(generation_config or {})
        named = _named_tokens(self._config)
        self._template = None if chat_template is None else ChatTemplate(chat_template, named)
        special = {i: token.content for i, token in backend.get_added_tokens_decoder().items() if token.special}
        self._special_ids = frozenset(special)
        longest_first = sorted(special.values(), key=len, reverse=True)
        self._special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        declared = [*_as_ids(self._generation_config.get("eos_token_id")), *self._id_of(named, "eos_token")]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*declared, *eos_token_ids]))
        """Ids that end a completion, as the model's files declare them."""
        self.pad_token_id: int = next(iter([*self._id_of(named, "pad_token"), *self.eos_token_ids, 0]))
        """Id to fill up with, masked everywhere: the declared pad token, else the first of `eos_token_ids`, else 0."""
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """Largest id + 1: the embedding needs at least as many rows."""

    @classmethod
    def from_dir(cls, path: str | Path) -> "Tokenizer":
        """Read the tokenizer of a Hugging Face directory; every file but tokenizer.json may be absent.

        Raises:
            ValueError: no tokenizer.json, or a file that cannot be read; the message names it.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(f"{file}: no such file; expected the tokenizer.json of a Hugging Face model directory")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the class that tokenizers raises
            raise ValueError(f"{file}: not a tokenizer ({error}); copy it again from the model's directory") from error
        config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
        return cls(
            backend,
            chat_template=_read_template(folder, config),
            config=config,
            generation_config=_read_json(folder / "generation_config.json"),
            eos_token_ids=_as_ids(_read_json(folder / "config.json").get("eos_token_id")),
        )

    @classmethod
    def byte_level(cls) -> "Tokenizer":
        """Return a tokenizer made from scratch: ids 0-255 are the bytes of UTF-8, then pad, user, assistant, end.

        Example: the user message "ab" is the prompt [257, 97, 98, 258]; "ba" is answered by [98, 97, 259]. Every role
        but assistant is written as a user turn.
        """
        vocab = {character: byte for byte, character in enumerate(_byte_alphabet())}
        backend = tokenizers.Tokenizer(models.BPE(vocab, []))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in BYTE_LEVEL_SPECIAL_TOKENS]
        backend.add_special_tokens(special)
        config = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "clean_up_tokenization_spaces": False}
        return cls(backend, chat_template=BYTE_LEVEL_TEMPLATE, config=config)

    def save(self, path: str | Path) -> None:
        """Write the files that `from_dir`, Hugging Face and vLLM read into directory `path`."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        self._backend.save(str(folder / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **self._config}
        config.pop("chat_template", None)  # it has a file of its own
        generation = {"pad_token_id": self.pad_token_id, **self._generation_config}
        generation["eos_token_id"] = list(self.eos_token_ids)
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
        if self._template:
            (folder / "chat_template.jinja").write_text(self._template.source, encoding="utf-8")

    @property
    def has_chat_template(self) -> bool:
        """Whether messages have a form; without a template only plain text prompts do."""
        return self._template is not None

    @functools.cached_property
    def end_token_id(self) -> int | None:
        """The token that ends the policy's turn: the one the template writes, else the first of `eos_token_ids`."""
        after = self._template.text_after_turn([_user("x")]) if self._template else None
        ids_T = self._encode_rendered(after or "")
        if ids_T.size and int(ids_T[0]) in self._special_ids:
            return int(ids_T[0])
        return self.eos_token_ids[0] if self.eos_token_ids else None

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """`eos_token_ids` and `end_token_id`: a template may close turns with a token that no file declares."""
        end = () if self.end_token_id is None else (self.end_token_id,)
        return tuple(dict.fromkeys([*self.eos_token_ids, *end]))

    def encode(self, text: str, *, parse_special: bool = False, add_special: bool = False) -> np.ndarray:
        """Return int32 [T], the tokens of `text`.

        Args:
            parse_special: special tokens spelled in `text` become themselves, not their letters.
            add_special: put around `text` what the tokenizer says starts or ends a sequence (a BOS token).
        """
        is_plain = parse_special or not self._special_pattern.search(text)
        backend = self._backend if is_plain else self._literal_backend
        try:
            encoding = backend.encode(text, add_special_tokens=add_special)
        except TypeError as error:
            raise ValueError(f"cannot encode {text!r:.99}: expected text without lone surrogates") from error
        return np.array(encoding.ids, dtype=np.int32)

    def decode(self, ids_T: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """Return the text of `ids_T`: bytes that are no UTF-8 become U+FFFD, ids without a token become nothing."""
        return self._backend.decode(np.asarray(ids_T).tolist(), skip_special_tokens=skip_special)

    def prompt_ids(self, prompt: Chat) -> np.ndarray:
        """Return int32 [T], what the policy continues: the rendered chat; without a template, BOS and the text."""
        if self._template is None and isinstance(prompt, str):
            return self.encode(prompt, add_special=True)
        return self.render_chat(_as_messages(prompt))

    def completion_ids(self, text: str) -> np.ndarray:
        """Return int32 [T], what the policy samples to say `text` and end its turn: a target to imitate."""
        end = [] if self.end_token_id is None else [self.end_token_id]
        return np.concatenate([self.encode(text), np.array(end, dtype=np.int32)])

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> np.ndarray:
        """Return int32 [T], the messages as the template writes them.

        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        if self._template is None:
            raise ValueError(
                "the model has no chat template, so messages have no form; add chat_template.jinja to its directory, "
                "or give prompts as plain text"
            )
        marked = [self._mark_literals(message) for message in messages]
        return self._encode_rendered(self._template.render(marked, add_generation_prompt))

    def bridge_ids(self, prompt: Chat, tokens_T: np.ndarray, reply: str) -> np.ndarray | None:
        """Return int32 [T], the tokens that follow a finished turn so that the policy answers the user's `reply` next.

        They are: what closes the turn (left out where the policy sampled it), the user turn, the generation prompt; all
        of it context, not trained. What `tokens_T` holds stays as it was sampled, and is not encoded again.

        Args:
            prompt: what the episode began with: some templates write later turns differently after a system message.
            tokens_T: all tokens of the episode so far; only the last one is looked at.
            reply: the environment's next user message.

        Returns:
            None if the template would rewrite earlier turns (it drops thoughts, or moves the system message): then
            render the whole chat and begin a new sequence.
        """
        if self._template is None:
            return self.encode(reply)
        marked = [self._mark_literals(message) for message in _as_messages(prompt)]
        text = self._template.text_to_next_turn(marked, self._mark_literals(_user(reply)))
        if text is None:
            return None
        ids_T = self._encode_rendered(text)
        sampled_stop = set(tokens_T[-1:].tolist()) & set(self.stop_token_ids)
        return ids_T[1:] if set(ids_T[:1].tolist()) & sampled_stop else ids_T

    def check_fits(self, num_embeddings: int) -> None:
        """Raise ValueError if some token has no row in an embedding of `num_embeddings` rows."""
        if self.vocab_size > num_embeddings:
            raise ValueError(
                f"the tokenizer does not fit the embeddings: its largest id is {self.vocab_size - 1}, the model has "
                f"{num_embeddings} rows; use the tokenizer.json that came with the model, or a model with a vocab_size "
                f"of at least {self.vocab_size}"
            )

    def _id_of(self, named: Mapping[str, str], kind: str) -> list[int]:
        """Return the id of a named token, or nothing if it is not declared."""
        if kind not in named:
            return []
        token_id = self._backend.token_to_id(named[kind])
        if token_id is None:
            raise ValueError(
                f"tokenizer_config.json: {kind}={named[kind]!r} is no token of tokenizer.json; correct one"
            )
        return [token_id]

    def _mark_literals(self, message: Message) -> Message:
        """Return `message` with marks around the special tokens spelled in its content."""
        content = message.get("content")
        if not isinstance(content, str):
            return message
        marked = self._special_pattern.sub(lambda found: _LITERAL_OPEN + found.group() + _LITERAL_CLOSE, content)
        return {**message, "content": marked}

    def _encode_rendered(self, text: str) -> np.ndarray:
        """Encode a rendered chat: the template's special tokens are parsed, the marked ones are letters."""
        pieces = re.split(f"{_LITERAL_OPEN}(.*?){_LITERAL_CLOSE}", text)  # every second one was marked
        return np.concatenate([self.encode(piece, parse_special=i % 2 == 0) for i, piece in enumerate(pieces)])

    @functools.cached_property
    def _literal_backend(self) -> tokenizers.Tokenizer:
        # A copy: the switch belongs to the object, and other threads may be encoding with it.
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.encode_special_tokens = True
        return backend


class StreamDecoder:
    """Decodes a completion token by token; gives out text only when its characters are complete.

    The pieces, `finish` included, add up to what `Tokenizer.decode` makes of all ids: for byte-level tokenizers always,
    for others as long as the text is valid UTF-8.

    Example, "aé" as the bytes 97, 195, 169: push(97) -> "a", push(195) -> "", push(169) -> "é", finish() -> "".
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._context_ids: list[int] = []  # given out whole; kept because some decoders look at the token before
        self._pending_ids: list[int] = []
        self._num_given = 0  # characters of context + pending that were given out

    def push(self, token_id: int) -> str:
        """Return the text that is certain now that `token_id` has come."""
        self._pending_ids.append(token_id)
        text = self._decode([*self._context_ids, *self._pending_ids])
        certain = text.rstrip(_REPLACEMENT)  # the next bytes may still complete what is missing
        piece = certain[self._num_given :]
        self._num_given += len(piece)
        if piece and certain == text:
            self._context_ids, self._pending_ids = self._pending_ids, []
            self._num_given = len(self._decode(self._context_ids))
        return piece

    def finish(self) -> str:
        """Return what was held back: no further token will complete it."""
        piece = self._decode([*self._context_ids, *self._pending_ids])[self._num_given :]
        self._num_given += len(piece)
        return piece

    def _decode(self, ids_T: Sequence[int]) -> str:
        return self._tokenizer.decode(ids_T, skip_special=self._skip_special)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}


def _as_messages(prompt: Chat) -> Sequence[Message]:
    return [_user(prompt)] if isinstance(prompt, str) else prompt


def _as_ids(value: object) -> list[int]:
    """Return the ids of an eos_token_id entry: absent, one or many."""
    values = value if isinstance(value, list) else [value]
    return [item for item in values if isinstance(item, int)]


def _named_tokens(config: Mapping[str, object]) -> dict[str, str]:
    """Return bos_token, eos_token ... of tokenizer_config.json; each is a string there, or a table with `content`."""
    entries = {key: value for key, value in config.items() if key.endswith("_token")}
    texts = {key: value.get("content") if isinstance(value, dict) else value for key, value in entries.items()}
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in byte-level BPE: itself if printable, else one past U+00FF."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)}
    stand_ins = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(stand_ins)) for byte in range(256)]


def _read_json(file: Path) -> dict[str, object]:
    """Return the object in `file`, or an empty one if there is no such file."""
    if not file.exists():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{file}: not readable JSON ({error}); copy it again from the model's directory") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: holds a {type(content).__name__}; expected a JSON object")
    return content


def _read_template(folder: Path, config: Mapping[str, object]) -> str | None:
    """Return the chat template: its own file wins over tokenizer_config.json, which may hold several by name."""
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    found = config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(
            f"{folder}/tokenizer_config.json: chat_template is a {type(found).__name__}; expected a string"
        )
    return found
