"""rl_jax/tokenizer.py and rl_jax/chat_template.py against bytes counted by hand, plain text and Python's UTF-8."""

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from rl_jax.tokenizer import StreamDecoder, Tokenizer

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}" + CHATML
)
CHATML_TRIMMED = CHATML.replace("m.content", "m.content | trim")
CHATML_WITHOUT_OLD_THOUGHTS = CHATML.replace(
    "m.content", "(m.content if loop.last else m.content.split('</think>')[-1].lstrip())"
)
SYSTEM_IN_LAST_USER = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<|im_start|>' + (system if loop.last else '') + m.content + '<|im_end|>' }}"
    "{% elif m.role == 'assistant' %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
)
BYTES = Tokenizer.byte_level()
TEXT = st.text(max_size=40)
WORDS = st.text(st.sampled_from("ab \n<|>é漢😀\u200d\ufffd"), max_size=12) | st.sampled_from(
    ["<|im_end|>", "a<|end|>b"]
)


def chatml_backend(trained: bool = False) -> tokenizers.Tokenizer:
    """Return a byte-level tokenizer with ChatML's two special tokens; trained: with merges across letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    if trained:
        trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(["the cat and the hat and the bat", "that is the other cat"] * 3, trainer)
    special = [tokenizers.AddedToken(token, special=True, normalized=False) for token in ("<|im_start|>", "<|im_end|>")]
    backend.add_special_tokens(special)
    return backend


def chatml(template: str | None, trained: bool = False) -> Tokenizer:
    """Return a tokenizer with `template` whose turns end with <|im_end|>."""
    return Tokenizer(chatml_backend(trained), chat_template=template, config={"eos_token": "<|im_end|>"})


CHATML_BYTES = chatml(CHATML)
APPEND_ONLY = {
    "chatml": CHATML_BYTES,
    "default system": chatml(CHATML_DEFAULT_SYSTEM),
    "byte level": BYTES,
}


# ---- text <-> ids


@given(TEXT)
def test_byte_level_ids_are_the_bytes_of_utf8_and_back(text):
    ids_T = BYTES.encode(text)
    assert ids_T.dtype == np.int32
    assert ids_T.tolist() == list(text.encode())
    assert BYTES.decode(ids_T) == text


@given(st.lists(st.integers(0, 255), max_size=30))
def test_byte_level_decodes_broken_utf8_as_python_does(ids):
    assert BYTES.decode(ids) == bytes(ids).decode(errors="replace")


def test_byte_level_prompt_and_completion_are_those_of_the_docstring():
    assert BYTES.prompt_ids("ab").tolist() == [257, 97, 98, 258]
    assert BYTES.completion_ids("ba").tolist() == [98, 97, 259]
    assert BYTES.decode([98, 97, 259]) == "ba"
    assert BYTES.decode([98, 97, 259], skip_special=False) == "ba<|end|>"
    assert (BYTES.vocab_size, BYTES.pad_token_id, BYTES.eos_token_ids, BYTES.stop_token_ids) == (
        260,
        256,
        (259,),
        (259,),
    )


def test_ids_without_a_token_have_no_text():
    assert BYTES.decode([97, 300, 98]) == "ab"


def test_special_tokens_in_text_are_letters_unless_parsed():
    text = "a<|end|>"
    assert BYTES.encode(text).tolist() == list(text.encode())
    assert BYTES.encode(text, parse_special=True).tolist() == [97, 259]


def test_text_that_cannot_be_encoded_is_refused_by_value():
    with pytest.raises(ValueError, match=r"cannot encode 'a.ud800b': expected text without lone surrogates"):
        BYTES.encode("a\ud800b")


def test_truncation_and_padding_stored_in_a_file_are_switched_off():
    backend = chatml_backend()
    backend.enable_truncation(3)
    backend.enable_padding(length=9)
    assert len(Tokenizer(backend).encode("a" * 5)) == 5


def test_check_fits_names_both_sizes():
    BYTES.check_fits(260)
    with pytest.raises(ValueError, match=r"largest id is 259, the model has 259 rows"):
        BYTES.check_fits(259)


# ---- streams


@given(st.lists(st.integers(0, 259), max_size=30), st.booleans())
def test_stream_gives_prefixes_of_the_whole_and_then_the_whole(ids, skip_special):
    stream, given_out = StreamDecoder(BYTES, skip_special=skip_special), ""
    whole = BYTES.decode(ids, skip_special=skip_special)
    for token_id in ids:
        given_out += stream.push(token_id)
        assert whole.startswith(given_out)
    assert given_out + stream.finish() == whole
    assert stream.finish() == ""


@given(TEXT)
def test_stream_gives_each_character_with_its_last_byte(text):
    stream = StreamDecoder(BYTES)
    for character in text.replace("\ufffd", ""):
        *first, last = character.encode()
        assert [stream.push(byte) for byte in first] == [""] * len(first)
        assert stream.push(last) == character


@given(st.lists(st.sampled_from(["\u2581a", "b", "\u2581", "é", "漢"]), max_size=12))
def test_stream_of_a_tokenizer_that_strips_its_first_space(pieces):
    vocab = {"\u2581a": 0, "b": 1, "\u2581": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    strip = decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), strip]
    )
    tokenizer = Tokenizer(backend)
    ids = [i for piece in pieces for i in ([vocab[piece]] if piece in vocab else [3 + byte for byte in piece.encode()])]
    stream = StreamDecoder(tokenizer)
    assert "".join(map(stream.push, ids)) + stream.finish() == "".join(pieces).replace("\u2581", " ").removeprefix(" ")


# ---- chats


@given(WORDS, WORDS)
def test_chat_ids_spell_the_template_and_messages_bring_no_special_token(first, second):
    messages = [{"role": "user", "content": first}, {"role": "assistant", "content": second}]
    ids_T = CHATML_BYTES.render_chat(messages)
    text = f"<|im_start|>user\n{first}<|im_end|>\n<|im_start|>assistant\n{second}<|im_end|>\n<|im_start|>assistant\n"
    assert CHATML_BYTES.decode(ids_T, skip_special=False) == text
    assert ids_T[ids_T >= 256].tolist() == [256, 257, 256, 257, 256]


def test_chat_is_encoded_in_one_piece_as_hugging_face_does():
    tokenizer = chatml(CHATML, trained=True)
    text = "<|im_start|>user\n the cat\n\n and that<|im_end|>\n<|im_start|>assistant\n"
    whole = chatml_backend(trained=True).encode(text, add_special_tokens=False).ids
    assert tokenizer.prompt_ids(" the cat\n\n and that").tolist() == whole
    assert len(whole) < len(text) - len("<|im_start|>" * 2 + "<|im_end|>") - 5  # merges were used


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ bos_token }}{{ unk_token }}", "<|im_start|>"),
        (
            "{% for m in messages %}\n  {% if loop.last %}\n{% break %}\n {% endif %}\n{{ m.content }}\n{% endfor %}",
            "<é>\n",
        ),
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<é>"}'),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "yes!"),
        ("{{ tools is none }} {{ documents is none }}", "True True"),
    ],
)
def test_templates_find_what_hugging_face_gives_them(template, expected):
    tokenizer = Tokenizer(chatml_backend(), chat_template=template, config={"bos_token": {"content": "<|im_start|>"}})
    ids_T = tokenizer.render_chat([{"role": "user", "content": "<é>"}, {"role": "assistant", "content": "yes"}])
    assert tokenizer.decode(ids_T, skip_special=False) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{{ raise_exception('roles must alternate') }}",
            r"refuses messages with roles \['user'\]: roles must alternate",
        ),
        ("{{ 'a' + messages[0].thought }}", r"refuses .*thought"),
        ("{{ messages[0].content.__class__.__mro__ }}", r"refuses .*unsafe"),
        ("{{ 'a' + 1 }}", r"refuses .*str"),
    ],
)
def test_a_template_that_fails_says_so(template, message):
    with pytest.raises(ValueError, match=message):
        chatml(template).prompt_ids("a")


def test_a_template_that_does_not_compile_names_the_line():
    with pytest.raises(ValueError, match="does not compile: line 2"):
        chatml("a\n{% if %}")


def test_without_a_template_prompts_are_plain_text_after_the_bos_token():
    backend = chatml_backend()
    backend.post_processor = tokenizers.processors.TemplateProcessing("<|im_start|> $A", None, [("<|im_start|>", 256)])
    base = Tokenizer(backend, config={"eos_token": "<|im_end|>"})
    a, b = base.encode("ab").tolist()
    assert base.prompt_ids("ab").tolist() == [256, a, b]
    assert base.bridge_ids("ab", np.array([a]), "ba").tolist() == [b, a]
    assert base.stop_token_ids == (257,)
    assert not base.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        base.prompt_ids([{"role": "user", "content": "a"}])


def test_the_token_that_closes_a_turn_stops_even_if_no_file_declares_it():
    tokenizer = Tokenizer(chatml_backend(), chat_template=CHATML, eos_token_ids=[9])
    assert (tokenizer.eos_token_ids, tokenizer.end_token_id, tokenizer.stop_token_ids) == ((9,), 257, (9, 257))
    assert tokenizer.completion_ids("").tolist() == [257]


# ---- later turns only append


@pytest.mark.parametrize("tokenizer", APPEND_ONLY.values(), ids=APPEND_ONLY)
@given(prompt=WORDS, words=st.lists(WORDS, min_size=1, max_size=3), reply=WORDS)
def test_bridged_turns_equal_the_chat_rendered_whole(tokenizer, prompt, words, reply):
    chat = [{"role": "user", "content": prompt}]
    tokens_T = tokenizer.prompt_ids(prompt)
    for said in words:
        tokens_T = np.concatenate([tokens_T, tokenizer.completion_ids(said)])
        tokens_T = np.concatenate([tokens_T, tokenizer.bridge_ids(prompt, tokens_T, reply)])
        chat += [{"role": "assistant", "content": said}, {"role": "user", "content": reply}]
    assert tokens_T.tolist() == tokenizer.render_chat(chat).tolist()


def test_what_was_sampled_is_kept_where_encoding_its_text_gives_other_tokens():
    tokenizer = chatml(CHATML, trained=True)
    prompt_T, letters_T = tokenizer.prompt_ids("the cat"), np.concatenate([tokenizer.encode(c) for c in "that cat"])
    tokens_T = np.concatenate([prompt_T, letters_T, [tokenizer.end_token_id]])
    episode_T = np.concatenate([tokens_T, tokenizer.bridge_ids("the cat", tokens_T, "and")])
    turns = [("user", "the cat"), ("assistant", "that cat"), ("user", "and")]
    whole_T = tokenizer.render_chat([{"role": role, "content": content} for role, content in turns])
    assert len(episode_T) == len(whole_T) + len(letters_T) - len(tokenizer.encode("that cat"))
    assert len(letters_T) > len(tokenizer.encode("that cat"))
    assert tokenizer.decode(episode_T, skip_special=False) == tokenizer.decode(whole_T, skip_special=False)


@pytest.mark.parametrize("tokenizer", APPEND_ONLY.values(), ids=APPEND_ONLY)
def test_a_turn_cut_by_length_is_closed_by_the_bridge(tokenizer):
    prompt_T = tokenizer.prompt_ids("the cat")
    cut_T = np.concatenate([prompt_T, tokenizer.encode("that")])
    closed_T = np.concatenate([cut_T, [tokenizer.end_token_id]])
    bridge_T = tokenizer.bridge_ids("the cat", closed_T, "and")
    assert tokenizer.bridge_ids("the cat", cut_T, "and").tolist() == [tokenizer.end_token_id, *bridge_T.tolist()]


def test_the_bridge_of_the_byte_level_template_is_reply_and_header():
    assert BYTES.bridge_ids("ab", np.array([257, 97, 98, 258, 120, 259]), "cd").tolist() == [257, 99, 100, 258]
    assert BYTES.bridge_ids("ab", np.array([257, 97, 98, 258, 120]), "cd").tolist() == [259, 257, 99, 100, 258]


def test_a_sampled_newline_is_not_taken_for_the_end_of_a_turn():
    tokenizer = chatml(CHATML.replace("<|im_end|>\n", "\n"))
    newline = tokenizer.encode("\n")
    assert tokenizer.bridge_ids("a", newline, "b").tolist() == tokenizer.bridge_ids("a", np.array([0]), "b").tolist()


def test_a_template_that_trims_still_bridges_and_keeps_what_was_sampled():
    bridge_T = chatml(CHATML_TRIMMED).bridge_ids("a", np.array([5, 5, 257]), "b")
    assert bridge_T.tolist() == CHATML_BYTES.bridge_ids("a", np.array([5, 5, 257]), "b").tolist()


def test_no_bridge_where_the_template_drops_thoughts_or_moves_the_system_message():
    assert chatml(CHATML_WITHOUT_OLD_THOUGHTS).bridge_ids("a", np.array([257]), "b") is None
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    tokenizer = chatml(SYSTEM_IN_LAST_USER)
    assert tokenizer.bridge_ids(system, np.array([257]), "b") is None
    assert (
        tokenizer.decode(tokenizer.bridge_ids("a", np.array([257]), "b"), skip_special=False)
        == "<|im_start|>b<|im_end|>"
    )


# ---- files


@pytest.mark.parametrize("tokenizer", [BYTES, CHATML_BYTES, chatml(None)], ids=["bytes", "chatml", "base"])
def test_saved_tokenizer_loads_equal(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "a")
    loaded = Tokenizer.from_dir(tmp_path / "a")
    assert loaded.prompt_ids("a\n<|end|>é").tolist() == tokenizer.prompt_ids("a\n<|end|>é").tolist()
    for name in ("vocab_size", "eos_token_ids", "stop_token_ids", "pad_token_id", "has_chat_template"):
        assert getattr(loaded, name) == getattr(tokenizer, name)
    loaded.save(tmp_path / "b")
    for file in (tmp_path / "a").iterdir():
        assert (tmp_path / "b" / file.name).read_text() == file.read_text()


def test_eos_ids_come_from_all_files_that_declare_one(tmp_path):
    chatml_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|im_end|>"}}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [256, 7], "temperature": 0.6}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.eos_token_ids == (256, 7, 257)
    assert tokenizer.pad_token_id == 256
    tokenizer.save(tmp_path / "again")
    again = json.loads((tmp_path / "again" / "generation_config.json").read_text())
    assert again == {"eos_token_id": [256, 7, 257], "temperature": 0.6, "pad_token_id": 256}


def test_the_template_file_wins_over_the_config_and_the_default_over_other_names(tmp_path):
    chatml_backend().save(str(tmp_path / "tokenizer.json"))
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.from_dir(tmp_path).decode(Tokenizer.from_dir(tmp_path).prompt_ids("a")) == "d"
    (tmp_path / "chat_template.jinja").write_text("file\n")
    assert Tokenizer.from_dir(tmp_path).decode(Tokenizer.from_dir(tmp_path).prompt_ids("a")) == "file"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", None, r"tokenizer.json: no such file; expected"),
        ("tokenizer.json", '{"model": 3}', r"tokenizer.json: not a tokenizer"),
        ("tokenizer.json", "{", r"tokenizer.json: not a tokenizer"),
        ("tokenizer_config.json", "{", r"tokenizer_config.json: not readable JSON"),
        ("generation_config.json", "[1]", r"generation_config.json: holds a list; expected a JSON object"),
        ("tokenizer_config.json", '{"eos_token": "<stop>"}', r"eos_token='<stop>' is no token"),
        ("tokenizer_config.json", '{"chat_template": 3}', r"chat_template is a int"),
        ("chat_template.jinja", "{% for %}", r"does not compile: line 1"),
    ],
)
def test_a_broken_directory_names_the_file(name, content, message, tmp_path):
    BYTES.save(tmp_path)
    file: Path = tmp_path / name
    if name == "tokenizer_config.json":
        (tmp_path / "chat_template.jinja").unlink()
    file.unlink() if content is None else file.write_text(content)
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_dir(tmp_path)
