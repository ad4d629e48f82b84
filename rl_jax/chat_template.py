"""A model's chat template: messages -> text, rendered as Hugging Face renders it (step 4 of docs/walk.md).

Also answers the question behind exact multi-turn: what does the template write after the policy's words, and does it
leave what came before alone? Knows text only; rl_jax/tokenizer.py turns it into ids.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import NoReturn, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

Message: TypeAlias = Mapping[str, object]
"""One turn of a chat: {"role": "user", "content": "Hello"}."""

# A Unicode noncharacter stands for the policy's words: no text holds it, no template strips it.
_WORDS = "\ufdd2"
_THOUGHT_AND_WORDS = f"<think>\n{_WORDS}\n</think>\n\n{_WORDS}"


class ChatTemplate:
    """A compiled template.

    Args:
        source: Jinja source.
        variables: names that it may use beside the messages (bos_token, eos_token ...).

    Example: with the source "{% for m in messages %}<{{ m.content }}>{% endfor %}", the message "ab" renders as "<ab>".
    """

    def __init__(self, source: str, variables: Mapping[str, str]):
        self.source = source
        self._variables = variables
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        """Return the text of `messages`, and with the generation prompt the header of the turn to write.

        Raises:
            ValueError: the template refuses the messages.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except (jinja2.TemplateError, TypeError) as error:
            roles = [message.get("role") for message in messages]
            raise ValueError(f"the chat template refuses messages with roles {roles}: {error}") from error

    def text_after_turn(self, messages: Sequence[Message]) -> str | None:
        """Return what follows the words of an assistant turn after `messages`, or None if the template rewrites it."""
        return self._text_after(_WORDS, messages, [])

    def text_to_next_turn(self, messages: Sequence[Message], reply: Message) -> str | None:
        """Return what stands between the words of the turn after `messages` and those of the turn that answers `reply`.

        None if the template is not append-only: with `reply` it changes `messages`, the turn, or thoughts in the turn.
        """
        if self._text_after(_THOUGHT_AND_WORDS, messages, [reply]) is None:
            return None
        return self._text_after(_WORDS, messages, [reply])

    def _text_after(self, words: str, messages: Sequence[Message], following: Sequence[Message]) -> str | None:
        before = self.render(messages, add_generation_prompt=True) + words
        turn = {"role": "assistant", "content": words}
        whole = self.render([*messages, turn, *following], add_generation_prompt=bool(following))
        return whole[len(before) :] if whole.startswith(before) else None


class _GenerationTag(jinja2.ext.Extension):
    """Some templates put assistant text in {% generation %} ... {% endgeneration %}: keep the text, drop the mark."""

    tags = {"generation"}  # noqa: RUF012 - the name and kind that Jinja asks for

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Return the marked statements."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """Return the sandbox that Hugging Face compiles chat templates in: same switches, filters and functions."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_template_error
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON as it is: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_template_error(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
