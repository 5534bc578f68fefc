"""Ids and text against transformers, and special tokens that text never becomes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from quire.errors import (
    InvalidRequestError,
    ModelFormatError,
    ModelNotFoundError,
    UnsupportedModelError,
)
from quire.frontend.gguf_tokenizer import read_gguf_tokenizer
from quire.frontend.hf_tokenizer import read_hf_tokenizer, write_hf_tokenizer
from quire.frontend.token_text import byte_level_alphabet
from quire.frontend.tokenizer import Tokenizer
from tests.frontend.helpers import (
    CONTROL,
    MARKERS,
    SPLITS,
    TEXTS,
    ambiguous_metadata,
    anything,
    byte_level_metadata,
    resplit,
    sentencepiece_metadata,
    special_ids_in,
    train_byte_level,
    transformers_from_gguf,
)
from tests.frontend.real_tokenizers import real_tokenizer_folder
from tests.long_runs import examples

FAMILIES = ["gpt-2", "smollm", "llama-bpe", "qwen2"]


@pytest.fixture(scope="module")
def hf_smollm2(smollm2_gguf: Path) -> Any:
    """transformers on the same file, with the pre-tokenizer of the model's own tokenizer.json.

    transformers 5 does not look at `tokenizer.ggml.pre = smollm` and leaves out the cutting of
    digits.
    """
    tokenizer = AutoTokenizer.from_pretrained(smollm2_gguf.parent, gguf_file=smollm2_gguf.name)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def hf_folder(backend: Backend, folder: Path, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def smollm2_has_byte(smollm2: Tokenizer, byte: int) -> bool:
    spelling = next(char for char, value in byte_level_alphabet().items() if value == byte)
    return smollm2.token_to_id(spelling) is not None


RECORDED = Path(__file__).with_name("smollm2_ids.json")
"""What transformers makes of TEXTS, in their order: it takes seconds to read the file."""


def test_smollm2_ids_are_those_that_transformers_gave(smollm2: Tokenizer) -> None:
    for text, ids in zip(TEXTS, json.loads(RECORDED.read_text()), strict=True):
        assert smollm2.encode(text) == ids
        assert smollm2.decode(ids) == text


@pytest.mark.slow
@pytest.mark.parametrize("text", TEXTS)
def test_smollm2_ids_equal_transformers(smollm2: Tokenizer, hf_smollm2: Any, text: str) -> None:
    ids = smollm2.encode(text)
    assert ids == hf_smollm2.encode(text) == json.loads(RECORDED.read_text())[TEXTS.index(text)]
    assert smollm2.decode(ids) == hf_smollm2.decode(ids) == text


@pytest.mark.slow
@settings(max_examples=examples(150))
@given(text=anything)
def test_smollm2_ids_equal_transformers_for_any_text(
    smollm2: Tokenizer, hf_smollm2: Any, text: str
) -> None:
    ids = smollm2.encode(text)
    assert ids == hf_smollm2.encode(text)
    # Its vocabulary has no token for a few control characters and for bytes of unassigned planes.
    if all(smollm2_has_byte(smollm2, byte) for byte in text.encode()):
        assert smollm2.decode(ids) == text


@pytest.mark.slow
def test_long_texts_are_encoded_like_short_ones(smollm2: Tokenizer, hf_smollm2: Any) -> None:
    text = "".join(TEXTS) * 20
    assert len(text) > 5000
    assert smollm2.encode(text, add_special_tokens=False) == hf_smollm2.encode(
        text, add_special_tokens=False, split_special_tokens=True
    )
    with pytest.raises(InvalidRequestError, match="surrogate"):
        smollm2.encode("a" * 5000 + "\ud800")


def test_smollm2_knows_its_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.vocab_size == 49152
    assert smollm2.bos_token_id == 1
    assert smollm2.eos_token_ids == (2, 0)
    assert smollm2.special_token_ids == frozenset(range(17))
    assert smollm2.encode("<|im_end|>", allow_special=True) == [2]
    assert smollm2.id_to_token(2) == "<|im_end|>"
    assert smollm2.token_to_id("<|im_end|>") == 2
    assert "im_start" in smollm2.chat_templates["default"]


def gguf_metadata() -> dict[str, dict[str, Any]]:
    found = {name: byte_level_metadata(train_byte_level(name), name) for name in FAMILIES}
    spaces = {f"sentencepiece {prefix}": sentencepiece_metadata(prefix) for prefix in (True, False)}
    templates = {
        "tokenizer.chat_template": "{{ 'ä' }}",
        "tokenizer.chat_template.tool_use": "{{ tools }}",
    }
    return found | spaces | {"templates": found["smollm"] | templates}


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "name", [*FAMILIES, "sentencepiece True", "sentencepiece False", "templates", "smollm2"]
)
def test_a_tokenizer_from_gguf_can_be_written_as_files(
    name: str, smollm2_metadata: dict[str, Any], tmp_path: Path
) -> None:
    before = read_gguf_tokenizer(smollm2_metadata if name == "smollm2" else gguf_metadata()[name])
    write_hf_tokenizer(before, tmp_path)
    after = read_hf_tokenizer(tmp_path)
    assert json.loads(after.backend.to_str()) == json.loads(before.backend.to_str())
    assert replace(after, backend=before.backend) == before


@pytest.mark.parametrize("pre", SPLITS)
def test_a_pre_tokenizer_by_its_name(pre: str) -> None:
    """As the tokenizer.json of the models it stands for has it."""
    reference = resplit(train_byte_level("qwen2"), pre)
    ours = Tokenizer.from_gguf(byte_level_metadata(reference, pre))
    words = "IT'S It'll 12345 ab12 ,/\n\n x=y.z e\u0301 私はカタカナ--\r\n'RE (Foo)Bar"
    for text in (*TEXTS, words):
        assert ours.encode(text) == reference.encode(text).ids
    backend = ours._backend  # a vocabulary this small hides where words end
    assert backend.pre_tokenizer.pre_tokenize_str(
        words
    ) == reference.pre_tokenizer.pre_tokenize_str(words)


@pytest.mark.slow
def test_a_cut_in_three_steps_is_the_real_one(real_deepseek: Path) -> None:
    """Hunyuan's is DeepSeek's."""
    real = json.loads((real_deepseek / "tokenizer.json").read_text())["pre_tokenizer"][
        "pretokenizers"
    ]
    assert tuple(one["pattern"]["Regex"] for one in real[:-1]) == SPLITS["hunyuan-dense"]


@pytest.fixture
def real_deepseek() -> Path:
    return real_tokenizer_folder("deepseek_v3")


@pytest.mark.parametrize(
    ("control", "ends"),
    [
        (("<|start|>", "<|end|>", "<|return|>", "<|call|>"), ("<|return|>", "<|call|>")),
        (("<|user|>", "<|end|>"), ("<|end|>",)),
        (("<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>",)),
    ],
)
def test_ends_of_turn_that_files_do_not_list(
    control: tuple[str, ...], ends: tuple[str, ...]
) -> None:
    backend = train_byte_level("qwen2")
    backend.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in control]
    )
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(backend, "gpt-4o"))
    listed = {"<|im_end|>", "<|endoftext|>"}
    assert {tokenizer.id_to_token(one) for one in tokenizer.eos_token_ids} == {*listed, *ends}


def test_phi_3s_control_tokens_swallow_white_space() -> None:
    """As its tokenizer.json says, and files do not."""
    metadata = sentencepiece_metadata() | {"general.architecture": "phi3"}
    counts = {}
    for name in ("phi3", "llama"):
        tokenizer = Tokenizer.from_gguf(metadata | {"general.architecture": name})
        ids = tokenizer.encode("</s>\n\na<s>\na", add_special_tokens=False, allow_special=True)
        counts[name] = len(ids)
        assert [ids.count(1), ids.count(2)] == [1, 1]
    plain = Tokenizer.from_gguf(metadata).encode("\n\n", add_special_tokens=False)
    # the space that a text begins with is not one of them
    assert counts["llama"] - counts["phi3"] == len(plain) - 1


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One tokenizer three ways: from a folder, from GGUF metadata, and transformers' own."""
    backend = train_byte_level(request.param)
    folder = hf_folder(backend, tmp_path_factory.mktemp(request.param), eos_token="<|im_end|>")
    from_gguf = Tokenizer.from_gguf(byte_level_metadata(backend, request.param))
    return (
        Tokenizer.from_hf_folder(folder),
        from_gguf,
        PreTrainedTokenizerFast.from_pretrained(folder),
    )


@settings(max_examples=examples(100))
@given(text=anything)
def test_byte_level_from_folder_gguf_and_transformers_agree(family: Any, text: str) -> None:
    from_folder, from_gguf, reference = family
    ids = from_folder.encode(text)
    assert ids == from_gguf.encode(text) == reference.encode(text)
    assert (
        from_folder.decode(ids)
        == from_gguf.decode(ids)
        == reference.decode(ids, skip_special_tokens=True)
    )


@pytest.mark.few(1)
@settings(max_examples=examples(100))
@given(numbers=st.lists(st.floats(0, 1, exclude_max=True), max_size=30), skip=st.booleans())
def test_byte_level_decodes_any_ids_like_transformers(
    family: Any, numbers: list[float], skip: bool
) -> None:
    from_folder, from_gguf, reference = family
    ids = [int(number * from_gguf.vocab_size) for number in numbers]
    expected = reference.decode(ids, skip_special_tokens=skip)
    assert from_gguf.decode(ids, skip_special_tokens=skip) == expected
    assert from_folder.decode(ids, skip_special_tokens=skip) == expected


@pytest.fixture(scope="module", params=[True, False], ids=["space-prefix", "no-space-prefix"])
def spm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """SentencePiece from GGUF, the same from transformers, and from the folder transformers saves."""
    metadata = sentencepiece_metadata(space_prefix=request.param)
    folder = tmp_path_factory.mktemp("spm")
    reference = transformers_from_gguf(metadata, folder)
    if not request.param:  # transformers does not read this key
        reference.backend_tokenizer.pre_tokenizer.prepend_scheme = "never"
        reference.backend_tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    saved = hf_folder(
        reference.backend_tokenizer, folder / "saved", eos_token="</s>", bos_token="<s>"
    )
    return Tokenizer.from_gguf(metadata), Tokenizer.from_hf_folder(saved), reference


@settings(max_examples=examples(150))
@given(text=anything)
def test_sentencepiece_from_gguf_folder_and_transformers_agree(spm: Any, text: str) -> None:
    from_gguf, from_folder, reference = spm
    text = text.replace("</s>", "")
    ids = from_gguf.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert ids == from_folder.encode(text, add_special_tokens=False)
    assert from_gguf.decode(ids) == from_folder.decode(ids) == reference.decode(ids)


@pytest.fixture(scope="module")
def ambiguous(tmp_path_factory: pytest.TempPathFactory) -> Any:
    metadata = ambiguous_metadata()
    return Tokenizer.from_gguf(metadata), transformers_from_gguf(
        metadata, tmp_path_factory.mktemp("ties")
    )


@settings(max_examples=examples(200))
@given(text=st.text("ab ", max_size=30))
def test_sentencepiece_merges_with_equal_scores_go_in_transformers_order(
    ambiguous: Any, text: str
) -> None:
    ours, reference = ambiguous
    assert ours.encode(text, add_special_tokens=False) == reference.encode(
        text, add_special_tokens=False
    )


@settings(max_examples=examples(100))
@given(numbers=st.lists(st.floats(0, 1, exclude_max=True), max_size=30))
def test_sentencepiece_decodes_like_transformers_but_for_broken_utf8(
    spm: Any, numbers: list[float]
) -> None:
    from_gguf, _, reference = spm
    ids = [int(number * from_gguf.vocab_size) for number in numbers]
    ours, theirs = from_gguf.decode(ids), reference.decode(ids, skip_special_tokens=True)
    # The library gives up a whole run of byte tokens for one bad byte; we replace what is bad.
    if "\ufffd" not in ours:
        assert ours == theirs
    else:
        assert "\ufffd" in theirs


def test_sentencepiece_adds_bos_and_falls_back_to_bytes(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("Ж")
    assert ids[0] == sentencepiece.bos_token_id == 1
    assert ids[-2:] == [3 + byte for byte in "Ж".encode()]
    assert sentencepiece.decode(ids) == "Ж"


def read_back(text: str) -> str:
    """What SentencePiece decodes: it writes spaces as "▁", so it does not tell the two apart, nor a
    leading space from the one it puts there itself."""
    return text.replace("▁", " ").removeprefix(" ")


forging = st.lists(
    st.one_of(st.sampled_from([*CONTROL, "<s>", "</s>", "<unk>", "<", "|>"]), anything), max_size=6
)


@settings(max_examples=examples(150))
@given(parts=forging)
@example(parts=["▁"])
@example(parts=["a▁", " b"])
def test_text_never_becomes_a_special_token(
    byte_level: Tokenizer, sentencepiece: Tokenizer, parts: list[str]
) -> None:
    text = "".join(parts)
    for tokenizer in (byte_level, sentencepiece):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert special_ids_in(ids, tokenizer) == []
        expected = read_back(text) if tokenizer.strips_first_space else normalize("NFC", text)
        assert tokenizer.decode(ids) == expected


def test_special_text_that_merges_spell_out_is_cut_apart(tmp_path: Path) -> None:
    vocabulary = {
        token: i for i, token in enumerate(["<unk>", "<s>", "<", "s", ">", "<s", "a", "▁", "b>"])
    }
    backend = Backend(models.BPE(vocabulary, [("<", "s"), ("<s", ">")], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<unk>", special=True)])
    tokenizer = Tokenizer.from_hf_folder(
        hf_folder(backend, tmp_path, bos_token="<s>", unk_token="<unk>")
    )
    ids = tokenizer.encode("a<s>a<s>", add_special_tokens=False)
    assert [tokenizer.id_to_token(i) for i in ids] == ["▁", "a", "<", "s", ">", "a", "<", "s", ">"]
    # Every occurrence is cut in one pass: this would take minutes if each cut encoded the rest
    # again.
    assert len(tokenizer.encode("<s>" * 20_000, add_special_tokens=False)) == 60_001
    # What the vocabulary has no token for may still be the unknown-token.
    assert tokenizer.encode("?", add_special_tokens=False)[-1] == 0


def test_the_mark_for_continuing_text_is_no_token_to_users(byte_level: Tokenizer) -> None:
    text = "a\U0010fffd\U0010fffc<|im_end|>\U0010fffd\U0010fffc"
    ids = byte_level.encode(text)
    assert byte_level.decode(ids) == text
    assert byte_level.encode_plain(text, continues=True) == ids


@settings(max_examples=examples(80))
@given(text=anything, data=st.data())
def test_cuts_keep_the_text_and_no_token_crosses_them(
    sentencepiece: Tokenizer, text: str, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(text)))
    left = sentencepiece.encode_plain(text[:cut])
    ids = sentencepiece.encode_plain(text, cuts=[cut])
    assert ids[: len(left)] == left
    assert sentencepiece.decode(ids) == read_back(text)


def test_added_tokens_that_are_not_special_are_ordinary_vocabulary(byte_level: Tokenizer) -> None:
    ids = byte_level.encode(f"a {MARKERS[0]} b")
    assert byte_level.token_to_id(MARKERS[0]) in ids
    assert byte_level.decode(ids) == f"a {MARKERS[0]} b"


@pytest.mark.parametrize(
    "flags", [{}, {"add_bos_token": True, "add_eos_token": True}, {"add_bos_token": False}]
)
@pytest.mark.parametrize("template", [None, "<|im_start|> $A", "<|im_start|> $A <|im_end|>"])
def test_what_is_put_around_a_text_is_what_transformers_puts(
    tmp_path: Path, flags: dict[str, bool], template: str | None
) -> None:
    backend = train_byte_level("llama-bpe")
    if template is not None:
        ids = [(text, backend.token_to_id(text)) for text in ("<|im_start|>", "<|im_end|>")]
        backend.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
    eos = {"__type": "AddedToken", "content": "<|im_end|>"}
    hf_folder(backend, tmp_path, bos_token="<|im_start|>", eos_token=eos, **flags)
    ours, reference = (
        Tokenizer.from_hf_folder(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    for text in ("the fox", ""):
        assert ours.encode(text) == reference.encode(text)
        assert ours.encode(text, add_special_tokens=False) == reference.encode(
            text, add_special_tokens=False
        )


def test_tokens_only_the_config_knows_get_the_ids_transformers_gives(tmp_path: Path) -> None:
    backend = train_byte_level("gpt-2")
    size = backend.get_vocab_size()
    decoder = {
        str(size): {"content": "<mark>", "special": False},
        str(size + 1): {"content": "<end>", "special": True},
    }
    hf_folder(backend, tmp_path, eos_token="<end>", pad_token="<pad>", added_tokens_decoder=decoder)
    ours, reference = (
        Tokenizer.from_hf_folder(tmp_path),
        PreTrainedTokenizerFast.from_pretrained(tmp_path),
    )
    text = "a<mark>b<pad><end>"
    assert ours.encode(text, allow_special=True) == reference.encode(text)
    assert ours.eos_token_ids == (size + 1,)
    assert ours.vocab_size == len(reference) == size + 3
    assert special_ids_in(ours.encode(text), ours) == []


def test_truncation_and_padding_in_tokenizer_json_are_not_applied(tmp_path: Path) -> None:
    backend = train_byte_level("gpt-2")
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    ours = Tokenizer.from_hf_folder(hf_folder(backend, tmp_path))
    assert ours.decode(ours.encode("a text of many more tokens")) == "a text of many more tokens"


def test_generation_config_adds_ends_of_answer(tmp_path: Path) -> None:
    backend = train_byte_level("gpt-2")
    hf_folder(backend, tmp_path, eos_token="<|im_end|>")
    end = backend.token_to_id("<|im_end|>")
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, end]}))
    assert Tokenizer.from_hf_folder(tmp_path).eos_token_ids == (end, 0)


def test_chat_templates_are_found_in_every_place(tmp_path: Path) -> None:
    listed = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    hf_folder(train_byte_level("gpt-2"), tmp_path, chat_template=listed)
    assert Tokenizer.from_hf_folder(tmp_path).chat_templates == {"default": "A", "tool_use": "B"}
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "C"}))
    assert Tokenizer.from_hf_folder(tmp_path).chat_templates == {"default": "C"}
    (tmp_path / "chat_template.jinja").write_text("D")
    assert Tokenizer.from_hf_folder(tmp_path).chat_templates == {"default": "D"}


@pytest.mark.parametrize("token_id", [-1, 10**9, True, "5"])
def test_ids_outside_the_vocabulary_are_named(byte_level: Tokenizer, token_id: Any) -> None:
    with pytest.raises(InvalidRequestError, match=repr(token_id).strip("'")):
        byte_level.decode([0, token_id])


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidRequestError, match="surrogate"):
        byte_level.encode("a\ud800")


def test_folders_without_tokenizer_json_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.from_hf_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedModelError, match="save_pretrained"):
        Tokenizer.from_hf_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match=r"tokenizer\.json"):
        Tokenizer.from_hf_folder(tmp_path)


def test_a_decoder_that_is_not_about_bytes_is_refused(tmp_path: Path) -> None:
    backend = train_byte_level("gpt-2")
    backend.decoder = decoders.WordPiece()
    with pytest.raises(UnsupportedModelError, match="WordPiece"):
        Tokenizer.from_hf_folder(hf_folder(backend, tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("model", "bert", UnsupportedModelError),
        ("pre", "klingon", UnsupportedModelError),
        ("pre", None, ModelFormatError),
        ("tokens", None, ModelFormatError),
        ("tokens", [1, 2], ModelFormatError),
        ("token_type", [1, 2], ModelFormatError),
        ("token_type", "x", ModelFormatError),
        ("merges", ["ab"], ModelFormatError),
        ("merges", ["zzz yyy"], ModelFormatError),
        ("eos_token_id", 10**6, ModelFormatError),
        ("bos_token_id", -1, ModelFormatError),
        ("add_bos_token", "yes", ModelFormatError),
    ],
)
def test_broken_gguf_metadata_is_named(key: str, value: Any, error: type[Exception]) -> None:
    metadata = byte_level_metadata(train_byte_level("gpt-2"), "gpt-2")
    metadata[f"tokenizer.ggml.{key}"] = value
    if value is None:
        del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(error, match=rf"tokenizer\.ggml\.{key}"):
        Tokenizer.from_gguf(metadata)
