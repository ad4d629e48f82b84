"""Messages and prompts of a body -> token ids. Knows the Tokenizer; what is done with the prompts it does not know."""

from collections.abc import Mapping, Sequence

import numpy as np

from rl_jax.chat_template import Message
from rl_jax.http.errors import Refused
from rl_jax.http.fields import Fields, is_integer, is_text
from rl_jax.http.service import Service


def read_messages(fields: Fields) -> list[Message]:
    """Return the messages of a chat; parts of text become one text."""
    fields.require("messages")
    raw: list[object] = fields.take("messages", [], "a list of messages", lambda v: isinstance(v, list))
    if fields.has("messages") and raw == []:
        fields.fault("messages=[]: expected at least one message")
    return [_read_message(fields, f"messages[{i}]", message) for i, message in enumerate(raw)]


def read_chat_settings(fields: Fields) -> bool:
    """Return whether the header of the turn to write is added; refuse what the template is not asked for."""
    for key in ("tools", "functions", "documents"):
        fields.neutral(key, [])
    fields.neutral("chat_template_kwargs", {})
    fields.neutral("chat_template")
    fields.neutral("reasoning_effort")
    fields.neutral("continue_final_message", False)
    return fields.flag("add_generation_prompt", True)


def render(service: Service, messages: Sequence[Message], add_generation_prompt: bool) -> np.ndarray:
    """Return int32 [T], the messages as the model's template writes them.

    Raises:
        Refused: there is no template, or it refuses the messages.
    """
    try:
        return service.tokenizer.render_chat(messages, add_generation_prompt)
    except ValueError as error:
        raise Refused(str(error)) from error


def read_prompts(fields: Fields, service: Service) -> list[str | list[int]]:
    """Return the prompts of a text completion: one or many, each a text or token ids."""
    fields.require("prompt")
    expected = "a string, a list of token ids, or a list of either"
    raw: object = fields.take("prompt", "", expected, lambda v: isinstance(v, str | list))
    is_one = isinstance(raw, str) or (isinstance(raw, list) and raw and isinstance(raw[0], int))
    prompts = [raw] if is_one else raw
    assert isinstance(prompts, list)
    if not prompts:
        fields.fault("prompt=[]: expected at least one prompt")
    return [_read_prompt(fields, service, prompt) for prompt in prompts]


def encode(service: Service, prompt: str | Sequence[int], add_special: bool) -> np.ndarray:
    """Return int32 [T]. A text prompt is the model's own language: special tokens spelled in it are special tokens."""
    if isinstance(prompt, str):
        return service.tokenizer.encode(prompt, parse_special=True, add_special=add_special)
    return np.array(prompt, np.int32)


def _read_prompt(fields: Fields, service: Service, prompt: object) -> str | list[int]:
    if is_text(prompt):
        return prompt
    if not isinstance(prompt, list):
        fields.fault(f"prompt: holds {prompt!r:.80}; expected a string or a list of token ids")
        return ""
    high = service.vocab_size - 1
    bad = next((item for item in prompt if not is_integer(item, 0, high)), None)
    if bad is not None:
        fields.fault(f"prompt: holds {bad!r:.80}; expected token ids from 0 to {high}")
    return prompt


def _read_message(fields: Fields, where: str, raw: object) -> Message:
    if not isinstance(raw, dict):
        fields.fault(f'{where}={raw!r:.80}: expected an object such as {{"role": "user", "content": "Hello"}}')
        return {}
    message: Mapping[str, object] = raw
    if not is_text(message.get("role")) or not message["role"]:
        fields.fault(f"{where}.role={message.get('role')!r:.80}: expected a string such as 'user'")
    return {**message, "content": _read_content(fields, where, message)}


def _read_content(fields: Fields, where: str, message: Mapping[str, object]) -> str | None:
    content = message.get("content")
    if is_text(content):
        return content
    if content is None and message.get("tool_calls"):
        return None
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) < len(parts) or not all(is_text(text) for text in texts):
        fields.fault(f"{where}.content={content!r:.80}: expected a string, or a list of parts of type text")
        return ""
    return "\n".join([str(text) for text in texts])
