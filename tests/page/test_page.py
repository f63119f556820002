"""The page in a browser (chromium): what a person does with it, on a server that says what the test wants.

The last test uses a real server with the embedded model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from inflight.entrypoints.serve.settings import ServerSettings
from tests.e2e.openai_server import running_server
from tests.support.browser import ALT, ENTER, ESCAPE, TAB, Browser, browser, needs_browser, until
from tests.support.scripted_chat import CUT, ScriptedChat, scripted_chat

pytestmark = [needs_browser, pytest.mark.timeout(600)]
MESSAGE = ".composer textarea"
ANSWER = ".message.assistant .text"
EMPTY = """
localStorage.clear();
sessionStorage.clear();
return new Promise((done) => {
  const gone = indexedDB.deleteDatabase("inflight");
  gone.onsuccess = gone.onerror = gone.onblocked = done;
});
"""

# What a model might say to run something in the page, or to send something away. `pwned` is set if it has.
INJECTIONS = [
    "<script>window.pwned = 1</script>",
    "<img src=x onerror='window.pwned=1'>",
    "<svg/onload=window.pwned=1>",
    "<iframe srcdoc='<script>parent.pwned=1</script>'></iframe>",
    "[click](javascript:window.pwned=1)",
    "[click](JaVaScRiPt:window.pwned=1)",
    "[click](java\tscript:window.pwned=1)",
    "[click](data:text/html,<script>window.pwned=1</script>)",
    "[click](vbscript:x)",
    "<javascript:window.pwned=1>",
    "![alt](http://127.0.0.1:9/leak?secret=1)",
    "![alt](javascript:window.pwned=1)",
    "![x](data:image/svg+xml,<svg onload=window.pwned=1>)",
    "<a href='javascript:window.pwned=1'>x</a>",
    "<style>body{display:none}</style>",
    "<link rel=stylesheet href=http://127.0.0.1:9/x.css>",
    "<meta http-equiv=refresh content='0;url=http://127.0.0.1:9/'>",
    "<base href=http://127.0.0.1:9/>",
    "<form action=http://127.0.0.1:9/><button>x</button></form>",
    '```html" onmouseover="window.pwned=1\n<script>window.pwned=1</script>\n```',
    "```js\n</code></pre><script>window.pwned=1</script>\n```",
    "`<script>window.pwned=1</script>`",
    r"$\href{javascript:window.pwned=1}{x}$",
    r"$\includegraphics{http://127.0.0.1:9/x.png}$",
    r"$\htmlClass{x}{y} \htmlStyle{background:url(http://127.0.0.1:9/)}{z}$",
    r"$\style{background:url(http://127.0.0.1:9/)}{z} \url{javascript:window.pwned=1}$",
    r"$\def\a{\a\a}\a$",
    "[ref]\n\n[ref]: javascript:window.pwned=1 'x'",
    "| a |\n|---|\n| <img src=x onerror=window.pwned=1> |",
    "- [ ] <input onfocus=window.pwned=1 autofocus>",
    "&lt;script&gt;window.pwned=1&lt;/script&gt; &#60;img src=x onerror=window.pwned=1&#62;",
    "<!-- --><script>window.pwned=1</script>",
    "<math><mtext></mtext><mglyph><style><img src=x onerror=window.pwned=1></style></mglyph></math>",
    "{{constructor.constructor('window.pwned=1')()}}",
    "__proto__ constructor toString hasOwnProperty",
    "\u202e\u0000\ufeff\ud7ff",
]  # fmt: skip


@pytest.fixture(scope="module")
def played() -> Iterator[tuple[ScriptedChat, str]]:
    with scripted_chat() as made:
        yield made


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as made:
        yield made


@pytest.fixture
def chat(played: tuple[ScriptedChat, str], window: Browser) -> Iterator[ScriptedChat]:
    """An empty chat. At its end the console has had no error."""
    app, url = played
    app.__init__()  # type: ignore[misc]
    window.open(f"{url}page/theme.js")
    window.run(EMPTY)
    window.resize(1280, 800)
    window.open(url)
    window.wait_for_text("#state", "ready")
    window.errors()
    yield app
    assert window.errors() == []


def send(window: Browser, text: str) -> None:
    window.type(MESSAGE, text + ENTER)


def wait_for_end(window: Browser) -> None:
    until(lambda: window.count(".stop[hidden]") == 1 and not window.count(".message.running"), "the end of the answer")


def ask(window: Browser, text: str = "Hello?") -> None:
    send(window, text)
    window.wait_for_text(".messages", text.split("\n")[0])
    wait_for_end(window)


def test_an_answer_streams_and_its_speed_is_shown_while_it_runs(chat: ScriptedChat, window: Browser) -> None:
    chat.say("One ", 0.3, "two ", 0.3, "three ", 3, "four.")
    send(window, "Count.")
    window.wait_for_text(ANSWER, "One two three")
    window.wait_for_text(".message.running .figures", "tokens/s")
    assert "four" not in window.text(ANSWER)
    wait_for_end(window)
    assert window.text(ANSWER) == "One two three four."
    (request,) = chat.requests
    assert request["messages"] == [{"role": "user", "content": "Count."}] and request["stream"] is True
    assert request["model"] == "played"


def test_the_progress_of_the_prompt_is_shown(chat: ScriptedChat, window: Browser) -> None:
    progress = {"choices": [], "prompt_progress": {"total": 400, "cache": 0, "processed": 100, "time_ms": 9}}
    chat.say({"event": progress}, 2, "Done.")
    send(window, "Read.")
    window.wait_for_text(".message.running .figures", "prompt 100 of 400 tokens (25 %)")
    wait_for_end(window)
    assert "prompt 7" in window.text(".message.assistant .figures")
    assert chat.requests[0]["return_progress"] is True and chat.requests[0]["timings_per_token"] is True


def test_stop_keeps_what_has_come_and_it_can_go_on(chat: ScriptedChat, window: Browser) -> None:
    chat.say("One two", 60)
    send(window, "Count.")
    window.wait_for_text(ANSWER, "One two")
    window.press(ESCAPE)
    window.wait_for_text(".message.assistant .figures", "stopped")
    assert window.text(ANSWER) == "One two"
    chat.say(" three.")
    window.click("[aria-label='Continue this answer']")
    window.wait_for_text(ANSWER, "One two three.")
    assert chat.requests[-1]["continue_final_message"] is True
    assert chat.requests[-1]["messages"][-1] == {"role": "assistant", "content": "One two"}


def test_reasoning_is_folded(chat: ScriptedChat, window: Browser) -> None:
    chat.say({"reasoning_content": "First <b>this</b>, "}, {"reasoning_content": "then that."}, "Done.")
    ask(window)
    assert window.count("details.reasoning[open]") == 0 and window.text(ANSWER) == "Done."
    window.click(".reasoning summary")
    assert window.text("details.reasoning pre") == "First <b>this</b>, then that."
    ask(window, "And then?")
    assert chat.requests[-1]["messages"][1]["reasoning_content"] == "First <b>this</b>, then that."


def test_calls_of_tools_get_results(chat: ScriptedChat, window: Browser) -> None:
    def call(index: int, city: str) -> dict[str, object]:
        begin = {"index": index, "id": f"call-{index}", "function": {"name": "weather", "arguments": ""}}
        return {"tool_calls": [begin, {"index": index, "function": {"arguments": json.dumps({"city": city})}}]}

    tools = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
    window.click("[aria-label='Options of requests']")
    window.type("textarea[aria-label='Tools']", json.dumps(tools))
    window.click("[aria-label='Close the options']")
    chat.say(call(0, "Oslo"), call(1, "Rome"), {"finish": "tool_calls"})
    ask(window)
    assert chat.requests[0]["tools"] == tools
    assert window.text(".call pre") == '{"city": "Rome"}'
    chat.say("Cold and warm.")
    for index, degrees in enumerate(("-3", "21")):
        window.click(f".call:nth-child({index + 1}) button")
        window.type("#ask-result", degrees + ENTER)
    window.wait_for_text(ANSWER, "Cold and warm.")
    messages = chat.requests[-1]["messages"]
    assert [each["function"]["name"] for each in messages[1]["tool_calls"]] == ["weather", "weather"]
    results = [(each["tool_call_id"], each["content"]) for each in messages[2:]]
    assert results == [("call-0", "-3"), ("call-1", "21")]


def test_edit_and_again_make_branches(chat: ScriptedChat, window: Browser) -> None:
    chat.script = lambda request: [
        {"content": f"To {request['messages'][-1]['content']}: answer {len(chat.requests)}."}
    ]
    ask(window, "first")
    window.click("[aria-label='Answer again, as another branch']")
    window.wait_for_text(ANSWER, "To first: answer 2.")
    wait_for_end(window)
    assert window.text(".message.assistant .branch") == "2 / 2"
    window.click(".message.assistant [aria-label='Earlier branch']")
    window.wait_for_text(ANSWER, "To first: answer 1.")
    window.click("[aria-label='Edit, as another branch']")
    window.type("[aria-label='Edit the message']", " edited" + ENTER)
    window.wait_for_text(ANSWER, "To first edited: answer 3.")
    wait_for_end(window)
    assert window.text(".message.user .branch") == "2 / 2"
    window.click(".message.user [aria-label='Earlier branch']")
    window.wait_for_text(ANSWER, "To first: answer 1.")


def test_files_are_a_part_of_the_message(chat: ScriptedChat, window: Browser, tmp_path: Path) -> None:
    text, image, binary = tmp_path / "notes.md", tmp_path / "dot.png", tmp_path / "data.bin"
    text.write_text("a ``` b")
    window.screenshot(image)
    binary.write_bytes(b"\xff\x00\xfe")
    window.choose_files("input[type=file]:not([accept])", text, image, binary)
    window.wait_for_text("#notices", "is no text in UTF-8 and no image")
    assert "takes no images" in window.text("#notices")
    ask(window, "Read.")
    assert chat.requests[0]["messages"][0]["content"] == "notes.md\n````\na ``` b\n````\n\nRead."


def test_images_for_a_model_that_takes_them(chat: ScriptedChat, window: Browser, tmp_path: Path) -> None:
    chat.modalities = ["text", "image"]
    window.run("location.reload()")
    window.wait_for_text("#state", "ready")
    image = tmp_path / "dot.png"
    window.screenshot(image)
    window.choose_files("input[type=file]:not([accept])", image)
    window.wait_for_text(".chip", "dot.png")
    ask(window, "What is this?")
    first, second = chat.requests[0]["messages"][0]["content"]
    assert first["image_url"]["url"].startswith("data:image/png;base64,") and second == {
        "type": "text",
        "text": "What is this?",
    }
    assert window.run(
        "const image = document.querySelector('.message img'); return image.complete && image.naturalWidth > 0"
    )


def test_options_become_fields_of_the_request(chat: ScriptedChat, window: Browser) -> None:
    window.click("[aria-label='Options of requests']")
    window.type("[aria-label='System prompt']", "Be brief.")
    for label, value in {"Temperature": "0.5", "Top k": "7", "Seed": "11", "Most tokens": "99"}.items():
        window.type(f"[aria-label='{label}']", value)
    window.type("[aria-label='Stop strings']", f"END{ENTER}STOP")
    window.type("[aria-label='JSON schema of the answer']", "{broken")
    window.click("[aria-label='Close the options']")
    window.wait_for_text("dialog .problem", "JSON schema of the answer")
    window.run("document.querySelector('[aria-label=\"JSON schema of the answer\"]').value = ''")
    window.type("[aria-label='JSON schema of the answer']", '{"type": "object"}')
    window.type("[aria-label='Further fields']", '{"logit_bias": {"7": -5}}')
    window.click("[aria-label='Close the options']")
    ask(window)
    request = chat.requests[0]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    named = ("temperature", "top_k", "seed", "max_completion_tokens", "stop", "logit_bias")
    assert {name: request[name] for name in named} == {
        "temperature": 0.5, "top_k": 7, "seed": 11, "max_completion_tokens": 99, "stop": ["END", "STOP"],
        "logit_bias": {"7": -5},
    }  # fmt: skip
    assert request["response_format"]["json_schema"]["schema"] == {"type": "object"}


def test_the_model_can_be_chosen(chat: ScriptedChat, window: Browser) -> None:
    window.run("const picker = document.getElementById('model'); picker.value = 'played-too';"
               "picker.dispatchEvent(new Event('change'))")  # fmt: skip
    window.run("location.reload()")
    window.wait_for_text("#state", "ready")
    ask(window)
    assert chat.requests[0]["model"] == "played-too"


def test_conversations_are_kept_found_exported_and_imported(
    chat: ScriptedChat, window: Browser, tmp_path: Path
) -> None:
    chat.script = lambda request: [{"content": f"About {request['messages'][-1]['content']}."}]
    for text in ("apples", "pears"):
        window.press(ALT, "n")
        ask(window, text)
    window.run("location.reload()")
    window.wait_for_text(".sidebar .list", "apples")
    assert window.text(".sidebar li.current .title") == "pears" and window.text(ANSWER) == "About pears."
    window.type("input[type=search]", "about apples")
    until(lambda: window.count(".sidebar li") == 1, "the list to become shorter")
    window.click(".sidebar li .title")
    window.wait_for_text(ANSWER, "About apples.")
    exported = window.run("return new Promise(done => {"
        "URL.createObjectURL = blob => (blob.text().then(done), 'data:,'); HTMLAnchorElement.prototype.click = () => {};"
        "document.querySelector(\"[aria-label='Export all conversations']\").click()})")  # fmt: skip
    file = tmp_path / "kept.json"
    file.write_text(exported)
    window.run("document.querySelector('input[type=search]').value = ''")
    window.choose_files(".sidebar input[type=file]", file)
    window.wait_for_text("#notices", "2 conversations were imported")
    assert window.count(".sidebar li") == 4
    file.write_text('{"format": "other"}')
    window.choose_files(".sidebar input[type=file]", file)
    window.wait_for_text("#notices", "cannot be imported")
    window.click("[aria-label='Delete pears']")
    window.click("dialog button.primary")
    until(lambda: window.count(".sidebar li") == 3, "a conversation to be deleted")


def test_an_imported_file_runs_nothing(chat: ScriptedChat, window: Browser, tmp_path: Path) -> None:
    bad = "<img src=x onerror=window.pwned=1>"
    files = [{"name": bad, "type": "x", "url": "javascript:window.pwned=1"}, {"name": bad, "type": bad, "text": bad}]
    node = {"id": "a", "parent": "", "role": "user", "content": bad, "files": files}
    kept = {"title": bad, "nodes": {"a": node}, "chosen": {"": "a"}, "system": bad}
    file = tmp_path / "bad.json"
    file.write_text(json.dumps({"format": "inflight-conversations", "version": 1, "conversations": [kept]}))
    window.choose_files(".sidebar input[type=file]", file)
    window.wait_for_text("#notices", "1 conversations were imported")
    window.click(".sidebar li .title")
    window.wait_for_text(".message.user .text", bad)
    assert window.run("return window.pwned") is None and window.count(".messages img") == 0


def test_markdown_code_and_formulas(chat: ScriptedChat, window: Browser) -> None:
    text = (
        "# Title\n\nSome **bold** and *soft* `code`, a [link](https://example.com/a?b=1) &amp; more.\n\n"
        "1. one\n2. two\n   - inner\n\n> quoted\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
        "```python\ndef f(x):\n    return 'text'  # note\n```\n\nEuler: $e^{i\\pi} + 1 = 0$, and\n\n"
        "$$\\sum_{k=1}^n k = \\frac{n(n+1)}{2}$$\n\n- [x] done\n\nCosts $5 and $6.\n"
    )
    chat.say(*(text[i : i + 7] for i in range(0, len(text), 7)))
    ask(window)
    counts = {
        "h2": 1, "strong": 1, "em": 1, "a[href='https://example.com/a?b=1'][rel~=noopener]": 1, "ol > li": 2, "ol ul li": 1,
        "blockquote": 1, "td.align-right": 1, "math": 2, "math[display=block] mfrac": 1, "input[type=checkbox]": 1,
        ".hljs-keyword": 2, ".hljs-string": 1, ".hljs-comment": 1,
    }  # fmt: skip
    assert {each: window.count(f"{ANSWER} {each}") for each in counts} == counts
    shown = window.text(ANSWER)
    assert "& more" in shown and "Costs $5 and $6." in shown and "def f(x):\n    return 'text'  # note" in shown
    window.run("location.reload()")  # the whole text at once gives the same as its parts
    window.wait_for_text(ANSWER, "Costs $5 and $6.")
    assert {each: window.count(f"{ANSWER} {each}") for each in counts} == counts and window.text(ANSWER) == shown


def test_nothing_that_a_model_says_runs_or_loads(chat: ScriptedChat, window: Browser) -> None:
    loaded = "performance.getEntriesByType('resource').map(entry => entry.name)"
    foreign = f"{loaded}.filter(name => !name.startsWith(location.origin))"
    for injection in INJECTIONS:
        chat.say(*(injection[i : i + 5] for i in range(0, len(injection), 5)), {"reasoning_content": injection})
        ask(window, injection if injection.isprintable() else "?")
    window.run(
        f"for (const link of document.querySelectorAll('{ANSWER} a')) link.dispatchEvent(new MouseEvent('mouseover'))"
    )
    for tag in ("script", "img", "iframe", "style", "link", "meta", "base", "form", "object", "mglyph"):
        assert window.count(f".messages {tag}") == 0, tag
    attributes = window.run("return [...document.querySelectorAll('.messages *')].flatMap(each => [...each.attributes])"
                            ".map(each => each.name).filter(name => /^on|srcdoc|^style$/.test(name))")  # fmt: skip
    assert set(attributes) <= {"style"}, "styles are set by the page's own code only"
    links = window.run(
        "return [...document.querySelectorAll('.messages a, .messages [href]')].map(each => each.getAttribute('href'))"
    )
    assert all(link.startswith(("http://", "https://", "mailto:")) for link in links)
    assert window.run("return window.pwned") is None and window.run(f"return {foreign}") == []
    assert "<script>window.pwned = 1</script>" in window.text(".messages")


def test_the_end_of_the_server_in_the_middle_of_an_answer(chat: ScriptedChat, window: Browser) -> None:
    chat.say("Half of ", 1, CUT)  # a browser drops what it has not read when a connection breaks
    send(window, "Tell me.")
    window.wait_for_text(".message.assistant .problem", "connection to the server was lost")
    assert window.text(ANSWER) == "Half of"
    window.run("location.reload()")
    window.wait_for_text(ANSWER, "Half of")
    chat.say("All of it.")
    window.click("[aria-label='Answer again, as another branch']")
    window.wait_for_text(ANSWER, "All of it.")
    chat.say({"event": {"error": {"message": "the engine failed: rank 1 is gone"}}})
    send(window, "Again.")
    window.wait_for_text(".message.assistant .problem", "the engine failed: rank 1 is gone")
    assert all("ERR_INCOMPLETE_CHUNKED_ENCODING" in error for error in window.errors())


def test_a_reload_in_the_middle_of_an_answer_keeps_it(chat: ScriptedChat, window: Browser) -> None:
    chat.say("One two", 1.2, " three", 60)
    send(window, "Count.")
    window.wait_for_text(ANSWER, "three")
    window.run("location.reload()")
    window.wait_for_text(ANSWER, "One two")
    assert window.count(".message.running") == 0


def test_all_with_the_keyboard_alone(chat: ScriptedChat, window: Browser) -> None:
    def focused() -> str:
        return str(
            window.run("const at = document.activeElement; return at.getAttribute('aria-label') ?? at.innerText")
        )

    def tab_to(label: str) -> None:
        for _ in range(60):
            if focused() == label:
                return
            window.press(TAB)
        raise AssertionError(f"Tab does not come to {label}")

    assert focused() == "Message"
    window.press("H")
    window.press("i")
    window.press(ENTER)
    window.wait_for_text(ANSWER, "Hello.")
    wait_for_end(window)
    tab_to("Options of requests")
    window.press(ENTER)
    until(lambda: focused() == "System prompt", "the dialog to have the focus")
    window.press(ESCAPE)
    until(lambda: window.count("dialog") == 0, "the dialog to close")
    tab_to("Answer again, as another branch")
    window.press(ENTER)
    until(lambda: len(chat.requests) == 2, "another answer")
    wait_for_end(window)
    tab_to("Rename Hi")
    window.press(ENTER)
    until(lambda: focused() != "Rename Hi", "the dialog")
    window.press("!")
    window.press(ENTER)
    until(lambda: window.text(".sidebar .title") == "!" or "!" in window.text(".sidebar .title"), "the new name")


@pytest.mark.parametrize("width", [380, 800, 1500])
def test_nothing_is_wider_than_the_window(chat: ScriptedChat, window: Browser, width: int) -> None:
    window.resize(width, 800)
    long = "x" * 300
    chat.say(
        f"{long}\n\n```\n{long}\n```\n\n| {' | '.join('abcdefghijklmnopqrst')} |\n{'|---' * 20}|\n\n$${'a+' * 80}b$$"
    )
    ask(window, "wide")
    assert window.run("return document.documentElement.scrollWidth <= innerWidth")
    inner = window.run("const list = document.querySelector('.messages'); return list.scrollWidth <= list.clientWidth")
    assert inner
    if width < 640:
        assert window.run("return getComputedStyle(document.querySelector('.sidebar')).display") == "none"
        window.click(".to-list")
        window.click(".sidebar .wide-button")
        until(lambda: window.count(".message") == 0, "an empty chat")


def test_a_long_answer_never_holds_the_page_up(chat: ScriptedChat, window: Browser) -> None:
    """A task of the page may take 50 ms on an idle machine. This one may be busy: most tasks must be short, and the last as
    short as the first, as the cost must not grow with the answer."""
    paragraph = "Some **words** with `code` and a formula $x^2$, then more words to fill the line.\n\n- one\n- two\n\n"
    chat.say(*([paragraph[i : i + 20] for i in range(0, len(paragraph), 20)] * 200))
    window.run("window.tasks = []; new PerformanceObserver(list => window.tasks.push(...list.getEntries()))"
               ".observe({entryTypes: ['longtask']})")  # fmt: skip
    ask(window)
    assert window.count(f"{ANSWER} strong") == 200
    tasks = window.run("return window.tasks.map(task => task.duration)")
    assert len(tasks) <= 20, tasks


def test_dark_and_light(chat: ScriptedChat, window: Browser) -> None:
    def brightness() -> int:
        return int(window.run("return Number(/\\d+/.exec(getComputedStyle(document.body).backgroundColor)[0])"))

    seen = {}
    for _ in range(3):
        seen[window.run("return document.documentElement.dataset.theme")] = brightness()
        window.click("#theme")
    assert set(seen) == {"auto", "light", "dark"} and seen["dark"] < 80 < 200 < seen["light"]


def test_a_real_server_with_a_key(window: Browser) -> None:
    settings = ServerSettings(api_keys=("first-key-1",), access_log="off")
    with running_server(settings=settings) as server:
        window.open(f"{server.url}/")
        window.type("#ask-key", "wrong-key-1" + ENTER)
        window.wait_for_text("dialog", "did not accept the last one")
        window.type("#ask-key", "first-key-1" + ENTER)
        until(lambda: window.count("#model option") == 1, "the models")
        window.click(MESSAGE)  # without it chromium gives keys to nobody after two dialogs
        ask(window, "What can you do?")
        assert len(window.text(ANSWER)) > 10 and "tokens/s" in window.text(".message.assistant .figures")
        window.run("location.reload()")
        until(lambda: window.count("#model option") == 1, "the models, without another question")
        assert "first-key-1" not in window.run("return JSON.stringify([localStorage, location.href, document.cookie])")
        assert all("401" in error for error in window.errors())
