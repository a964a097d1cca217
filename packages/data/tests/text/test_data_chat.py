"""Conversations to tokens: templates, what is learnt, where turns end, and what is refused."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from mimo.data import LimitedTokenizer
from mimo.data.text.byte_tokenizer import ByteConfig, build
from mimo.data.text.chat import Chat, ChatError, ChatSettings, ChatTokens
from mimo.data.text.chat_template import ChatTemplate, named_template, named_templates, template_of_folder
from mimo.data.text.conversation import Conversation, RecordItem, parse_conversation
from mimo.data.text.limited import LimitedTokenizer as Limited
from mimo.data.text.render import Limits, Renderer, RenderError
from mimo.hooks import ConfigError, DataError, JsonNode, JsonSource

BYTES = build(ByteConfig(), ["image"])
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "image", "image": "a.png"}, {"type": "text", "text": "What is it?"}]},
    {"role": "assistant", "content": "A zebra 🦓."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
UNMARKED = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)

LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def conversation(turns: Any = TURNS) -> Conversation:
    """Return a parsed one."""
    return parse_conversation(JsonNode(turns, JsonSource(where="a.jsonl:3", error=DataError)))


class Own:
    """Bytes, with a template beside them."""

    def __init__(self, source: str) -> None:
        self.template = ChatTemplate(name="own.jinja", source=source)

    def __getattr__(self, name: str) -> Any:
        return getattr(BYTES, name)

    def chat_template(self) -> ChatTemplate:
        """Return it."""
        return self.template


def encode(turns: Any = TURNS, *, source: str | None = None, **settings: Any) -> ChatTokens:
    """Return the tokens of turns, with a template of one's own or a named one."""
    tokenizer: Any = BYTES if source is None else Own(source)
    chosen = {"template": "chatml" if source is None else "own", **settings}
    return Chat(ChatSettings(**chosen), tokenizer).encode(conversation(turns))


def learnt(tokens: ChatTokens) -> str:
    """Return the text of what is learnt."""
    assert tokens.weights is not None
    return BYTES.decode([number for number, weight in zip(tokens.ids, tokens.weights, strict=True) if weight])


def test_data_chat_learns_what_the_assistant_says() -> None:
    """With the token that ends its turn; items are placeholders, and a letter of several bytes is learnt whole."""
    tokens = encode()
    assert BYTES.decode(tokens.ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<image>What is it?<|im_end|>\n"
        "<|im_start|>assistant\nA zebra 🦓.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n"
        "<|im_start|>assistant\nYes.<|im_end|>\n"
    )
    assert learnt(tokens) == "A zebra 🦓.<|im_end|>Yes.<|im_end|>"
    assert learnt(encode(learn="last")) == "Yes.<|im_end|>"
    assert encode(learn="all").weights is None


def test_data_chat_turns_end_where_the_next_begins() -> None:
    """Each may be the last; where tokens are cut, any token may."""
    tokens = encode()
    assert tokens.ends is not None
    pieces = [BYTES.decode(tokens.ids[:end]) for end in tokens.ends]
    assert [piece.count("<|im_start|>") for piece in pieces] == [1, 2, 3, 4, 5]
    assert all(piece.endswith("<|im_end|>\n") for piece in pieces)
    assert encode(cut="tokens").ends is None


@pytest.mark.parametrize("learn", ["assistant", "last"])
def test_data_chat_without_marks_learns_the_difference(learn: str) -> None:
    """Between the text that asks for an answer and that which has it."""
    tokens = encode(source=UNMARKED, learn=learn)
    assert learnt(tokens) == ("A zebra 🦓.;Yes.;" if learn == "assistant" else "Yes.;")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        (
            (
                "{% for m in messages %}[{{ m.role }}]"
                "{{ '' if m.role == 'assistant' and not loop.last else m.content }}"
                "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
            ),
            (
                "the template 'own.jinja' writes the turns up to message 1 otherwise where others follow, so what the "
                'model is to write can\'t be found; choose a template with {% generation %}, or set learn = "all"'
            ),
        ),
        ("{{ raise_exception('no system text') }}", "refuses it: TemplateError: no system text"),
        (
            "{{ messages[0].content }}{% if messages[3] %}{{ messages.append(1) }}{% endif %}",
            "refuses it: SecurityError",
        ),
        (
            "{{ messages[0].content }}{% if messages[3] %}{{ ''.__class__.__mro__ }}{% endif %}",
            "refuses it: SecurityError",
        ),
        ("{% if %}", "refuses it: it can't be compiled: TemplateSyntaxError"),
        ("{% generation %}{% generation %}a{% endgeneration %}{% endgeneration %}", "blocks stand in each other"),
        (
            "{% set a %}{% generation %}a{% endgeneration %}{% endset %}{{ a | length }}",
            "depends on what stands around",
        ),
    ],
)
def test_data_chat_templates_that_fail_are_named(source: str, why: str) -> None:
    """With what they said; and one that writes early answers otherwise once there are later ones is refused."""
    with pytest.raises(ChatError) as caught:
        encode([TURNS[1], TURNS[2], TURNS[3], TURNS[4]], source=source)
    assert why in str(caught.value)
    assert "own.jinja" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "limits", "why"),
    [
        (LOOP, {"seconds": 0.5}, "0.5 s"),
        ("{{ 'a' * 1000000000 }}", {"memory": 1 << 28}, "as where it needs more than 256 MiB"),
        ("{{ 'a' * 3000000 }}", {"answer": 1 << 20}, "its text is longer than 1,048,576 bytes"),
    ],
)
def test_data_chat_templates_have_limits(source: str, limits: dict[str, Any], why: str) -> None:
    """On time, memory and text; the next question is answered all the same."""
    renderer = Renderer(source + "{{ text }}", Limits(**limits))
    with pytest.raises(RenderError, match=why):
        renderer.render({"text": "a"})
    short = Renderer("{% if long %}" + source + "{% endif %}{{ text }}", Limits(**limits))
    with pytest.raises(RenderError, match=why):
        short.render({"long": True})
    assert short.render({"text": "b"}).text == "b"


@pytest.mark.parametrize(
    ("source", "asked", "why"),
    [
        ("{% for m in messages %}" + LOOP + "{% endfor %}", 1, r"own\.jinja' refuses it: it takes longer than 0\.5 s"),
        ("{% if %}", 1, r"own\.jinja' refuses it: it can't be compiled: TemplateSyntaxError"),
        ("{{ raise_exception('never') }}", 8, r"own\.jinja' refuses it: TemplateError: never"),
        ("nothing of it", 8, r"own\.jinja' writes neither a text nor a list of parts of a message"),
    ],
)
def test_data_chat_template_that_can_write_nothing_is_asked_once(
    source: str, asked: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that exceeds a limit with the first conversation that it is tried on isn't tried on others, nor again."""
    count = 0

    class Counting(Renderer):
        def __init__(self, source: str) -> None:
            super().__init__(source, Limits(seconds=0.5))

        def render(self, variables: Any, firsts: Any = ()) -> Any:
            nonlocal count
            count += 1
            return super().render(variables, firsts)

    monkeypatch.setattr("mimo.data.text.chat.Renderer", Counting)
    tokenizer: Any = Own(source)
    chat = Chat(ChatSettings(), tokenizer)
    for _ in range(3):
        with pytest.raises(ChatError, match=why):
            chat.encode(conversation())
        with pytest.raises(ChatError, match=why):
            chat.ask(["Sure?"])
    assert count == asked


def test_data_chat_contents_are_written_as_the_template_takes_them() -> None:
    """As parts, where it goes through them; one that reads texts alone gets a text, with placeholders."""
    parts = "{% for m in messages %}{% for p in m.content %}{{ p.text or '<' + p.type + '>' }}|{% endfor %}{% endfor %}"
    assert BYTES.decode(encode(TURNS[:2], source=parts, learn="all").ids) == "Be brief.|<image>|What is it?|"
    assert BYTES.decode(encode(TURNS[1:2], source=UNMARKED, learn="all").ids) == "[user]<image>What is it?;"


def test_data_chat_marks_need_no_stable_turns() -> None:
    """What is marked is learnt, also where early turns are written otherwise; the last answer is not found there."""
    source = (
        "{% for m in messages %}{{ loop.revindex }}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endif %}{% endfor %}"
    )
    tokens = encode(TURNS[1:], source=source)
    assert learnt(tokens) == "A zebra 🦓.Yes."
    assert tokens.ends == (len(tokens.ids),)
    with pytest.raises(ChatError, match="writes the turns up to message 3 otherwise"):
        encode(TURNS[1:], source=source, learn="last")


def test_data_chat_of_many_turns() -> None:
    """Each is written once for every later one, which hundreds of turns allow."""
    tokens = encode([TURNS[3], TURNS[4]] * 100)
    assert tokens.ends is not None
    assert len(tokens.ends) == 200
    assert learnt(tokens) == "Yes.<|im_end|>" * 100


def test_data_chat_system_text_is_added_where_there_is_none() -> None:
    """A conversation's own stays."""
    assert "system\nBe kind.<" in BYTES.decode(encode(TURNS[1:3], system="Be kind.").ids)
    assert BYTES.decode(encode(TURNS[:3], system="Be kind.").ids).count("Be kind.") == 0


def test_data_chat_keys_that_a_template_does_not_read_are_refused() -> None:
    """Nothing of a conversation is left out silently; the texts of tool calls are kept."""
    call = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"x": "é"}}}]}
    tool = {"role": "tool", "content": "3", "tool_call_id": "1"}
    assert learnt(encode([TURNS[3], call, tool])) == (
        '<tool_call>\n{"name": "f", "arguments": {"x": "é"}}\n</tool_call><|im_end|>'
    )
    with pytest.raises(ChatError, match="the template 'gemma' does not read 'tool_calls'; choose another, or leave it"):
        encode([TURNS[3], call], template="gemma")


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a.jsonl:3: expected at least one message, got []"),
        ([{"content": "a"}], "a.jsonl:3[0]: expected an object with 'role'"),
        ([{"role": "user"}], "expected a message with 'content'"),
        ([{"role": "user", "content": 3}], "a.jsonl:3[0].content: expected a text or a list of parts, got 3"),
        (
            [{"role": "user", "content": [{"type": "image", "url": "https://a.b/c.png"}]}],
            (
                "a.jsonl:3[0].content[0].url: expected a path inside the folder of the data, or a data URL in base64; "
                'nothing is fetched, got "https://a.b/c.png"'
            ),
        ),
        ([{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,a"}]}], "expected base64"),
        ([{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,é"}]}], "expected base64"),
        ([{"role": "user", "content": [{"type": "image", "image": "data:" + "a" * 100_000}]}], "nothing is fetched"),
        ([{"role": "user", "content": [{"type": "", "url": "b"}]}], "expected the type of a part"),
        ([{"role": "user", "content": [{"type": "image", "image": "a", "url": "b"}]}], "expected one of the keys"),
    ],
)
def test_data_chat_messages_are_checked(messages: Any, message: str) -> None:
    """Each refusal names file, line and the keys on the way."""
    with pytest.raises(DataError) as caught:
        conversation(messages)
    assert message in str(caught.value)


def test_data_chat_items_follow_their_placeholders() -> None:
    """Those named in messages among those of the sample's own lists, whose placeholders stand in texts."""
    turns = [
        {"role": "user", "content": "<image> and"},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "QUI=", "format": "wav"}}]},
        {"role": "user", "content": [{"type": "image"}, {"type": "radio", "radio": "r.bin"}]},
    ]
    listed = [RecordItem("image", "1.png"), RecordItem("image", "2.png", "output"), RecordItem("image", "3.png")]
    assert conversation(turns).items(listed) == [
        RecordItem("image", "1.png"),
        RecordItem("audio", b"AB"),
        RecordItem("image", "2.png", "output"),
        RecordItem("radio", "r.bin"),
        RecordItem("image", "3.png"),
    ]


def test_data_chat_items_of_a_modality_stand_in_one_place() -> None:
    """Which of a list and of those named in messages comes first could not be known."""
    turns = [{"role": "user", "content": ["<image>", {"type": "image", "image": "b.png"}]}]
    with pytest.raises(ValueError, match="items of modality 'image' both in messages and in a list of the sample"):
        conversation(turns).items([RecordItem("image", "1.png")])


def test_data_chat_gives_templates_what_transformers_gives() -> None:
    """No tools are None, what is null is absent, and thoughts have the names under which templates read them."""
    source = (
        "{% if tools is not none %}T{% endif %}{% for m in messages %}{{ m.role[0] }}{{ m.reasoning_content }}"
        "{% if m.content is defined %}[{{ m.content }}]{% endif %}"
        "{% for c in m.tool_calls or [] %}C{% endfor %}{% endfor %}"
    )
    turns = [
        {"role": "user", "content": "hi", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [{}], "reasoning": "so"},
    ]
    assert BYTES.decode(encode(turns, source=source, learn="all").ids) == "u[hi]asoC"


@pytest.mark.parametrize(
    ("turns", "settings", "why"),
    [
        ([{"role": "human", "content": "a"}], {}, "no message has the role 'assistant', so nothing would be learnt"),
        ([{"role": "user", "content": "a", "name": "Bob"}, TURNS[2]], {"template": "gemma"}, "does not read 'name'"),
        ([TURNS[0], TURNS[2]], {"template": "gemma"}, "the system text has no message of the user to stand before"),
        ([TURNS[3], TURNS[4]], {"source": "nothing"}, "writes neither a text nor a list of parts"),
    ],
)
def test_data_chat_loses_nothing_silently(turns: Any, settings: Any, why: str) -> None:
    """What would be left out or not be learnt is refused."""
    with pytest.raises(ChatError, match=why):
        encode(turns, **settings)


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        ("asistant", "assistant"),
        ("Assistant", "assistant"),
        ("assistant ", "assistant"),
        ("usr", "user"),
        ("sytem", "system"),
        ("tol", "tool"),
    ],
)
def test_data_chat_misspelt_roles_are_refused(role: str, meant: str) -> None:
    """With the role that is meant, to be learnt or to be answered, unless the template names them as they are."""
    turns = [{"role": role, "content": "a"}, TURNS[1], TURNS[2], {"role": role, "content": "b"}]
    why = f"message 0 has the role {role!r}, which the template 'chatml' does not name; did you mean {meant!r}?"
    chat = Chat(ChatSettings(template="chatml"), BYTES)
    for use in (chat.encode, chat.open):
        with pytest.raises(ChatError, match=f"^{re.escape(why)}$"):
            use(conversation(turns))
    for named in (f"{{% if '{role}' %}}{{% endif %}}", f'{{% if "{role}" %}}{{% endif %}}'):
        assert f"[{role}]b" in BYTES.decode(encode(turns, source=named + UNMARKED).ids)


@pytest.mark.parametrize(
    "role", ["system", "developer", "tool", "tools", "function", "ipython", "model", "user1", "userB", "users", "Tom"]
)
def test_data_chat_other_roles_are_the_template_s(role: str) -> None:
    """Names of other speakers, and those that a usual role is a part of, are written as they are."""
    turns = [TURNS[1], {"role": role, "content": "b"}, TURNS[2]]
    assert f"<|im_start|>{role}\nb<|im_end|>" in BYTES.decode(encode(turns).ids)


def test_data_chat_marks_in_comments_are_none() -> None:
    """A template that only speaks of them is one without."""
    assert learnt(encode(source="{# {% generation %} #}" + UNMARKED)) == "A zebra 🦓.;Yes.;"


def test_data_chat_template_lies_beside_the_tokenizer(tmp_path: Path) -> None:
    """Where transformers saves it, in a file of its own or among the tokenizer's settings, with the special tokens."""
    assert template_of_folder(tmp_path) is None
    config: dict[str, Any] = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "a"}
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(config))
    assert template_of_folder(tmp_path) == ChatTemplate(
        name=str(path), source="a", variables={"bos_token": "<s>", "eos_token": "</s>"}
    )
    path.write_text(json.dumps({"chat_template": [{"name": "default", "template": "b"}]}))
    found = template_of_folder(tmp_path)
    assert found is not None
    assert found.source == "b"
    (tmp_path / "chat_template.jinja").write_text("c")
    found = template_of_folder(tmp_path)
    assert found is not None
    assert found.source == "c"
    path.write_text("[")
    with pytest.raises(ConfigError, match=r"tokenizer\.path: expected JSON"):
        template_of_folder(tmp_path)


def test_data_chat_needs_a_template() -> None:
    """The refusal names those that there are; other names are refused where they are set."""
    with pytest.raises(ConfigError) as caught:
        Chat(ChatSettings(), BYTES)
    assert str(caught.value) == (
        "data.chat.template: expected the name of a template, since samples are conversations and the tokenizer has "
        "none of its own, got 'own'. Set it to one of chatml, gemma, llama-3, mistral, or lay chat_template.jinja "
        "beside the tokenizer."
    )
    with pytest.raises(ValueError, match="expected 'own', 'chatml', 'gemma', 'llama-3' or 'mistral', got 'chat'"):
        ChatSettings(template="chat")


@pytest.mark.parametrize("name", named_templates())
def test_data_chat_named_templates_mark_what_is_learnt(name: str) -> None:
    """Their answers end with the token that ends a turn, and the end of each turn is found."""
    tokens = encode(template=name)
    assert learnt(tokens).count("zebra") == learnt(tokens).count("Yes.") == 1
    assert learnt(tokens)[-1] == ">"
    assert tokens.ends is not None
    assert len(tokens.ends) >= 4
    assert named_template(name).name == name


@pytest.mark.parametrize("length", [3, 30_000])
def test_data_chat_of_a_long_conversation_is_encoded_as_far_as_it_can_matter(length: int) -> None:
    """The limit changes nothing of the ids that a sample has room for; all placeholders are there."""
    turns = [*TURNS[:4], {"role": "user", "content": "a b " * length + "<image>"}, TURNS[4]]
    limited = LimitedTokenizer(inner=BYTES, max_tokens=150, modalities=("image",))
    assert isinstance(limited, Limited)
    settings = ChatSettings(template="chatml")
    found, full = (Chat(settings, each).encode(conversation(turns)) for each in (limited, BYTES))
    assert found.ids[:150] == full.ids[:150]
    assert found.ids.count(BYTES.placeholder("image")) == 2
    assert found.weights is not None
    assert full.weights is not None
    assert found.weights[:150].tolist() == full.weights[:150].tolist()
    assert len(found.ids) == len(found.weights)
    assert [end for end in found.ends or () if end <= 150] == [end for end in full.ends or () if end <= 150]


def _render_and_end(sends: Connection) -> None:
    """Render something in a process that then ends, having said which one renders for it."""
    held: list[Any] = [Renderer("{{ text }}")]
    assert held[0].render({"text": "a"}).text == "a"
    held.append(held)  # so that the renderer is not freed before the process ends
    sends.send(int(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text()))


def test_data_chat_templates_leave_no_process_behind() -> None:
    """A rank is a process that was forked; when it has ended, so has the one that rendered for it."""
    context = multiprocessing.get_context("fork")
    receives, sends = context.Pipe(duplex=False)
    rank = context.Process(target=_render_and_end, args=(sends,))
    rank.start()
    child = receives.recv()
    rank.join()
    assert not Path(f"/proc/{child}").exists()


def test_data_chat_asks_for_the_next_answer() -> None:
    """After what was said by turns, with the system text of the settings; and refuses to have the assistant ask."""
    chat = Chat(ChatSettings(template="chatml", system="Be brief."), BYTES)
    assert chat.ask(["<image>What?", "A horse.", "Sure?"]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<image>What?<|im_end|>\n"
        "<|im_start|>assistant\nA horse.<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(ChatError, match=r"^2 turns, of which the user would not say the first and the last$"):
        chat.ask(["What?", "A horse."])
    own: Any = Own("{{ raise_exception('never') }}")
    with pytest.raises(ChatError, match=r"the template 'own\.jinja' refuses it: .*never"):
        Chat(ChatSettings(), own).ask(["What?"])
