"""Templates that misbehave end in a TemplateError, soon and without a trace of Python's insides."""

from __future__ import annotations

import contextlib
import time
from datetime import datetime

import pytest

from quire.errors import TemplateError
from quire.frontend import template_limits
from quire.frontend.chat_template import ChatTemplate
from quire.frontend.template_sandbox import BoundedEnvironment

DIALOGUE = [{"role": "user", "content": "x" * 1000}]
GROW = "{%% set ns = namespace(x='ab') %%}{%% for i in range(99) %%}{%% set ns.x = %s %%}{%% endfor %%}{{ ns.x }}"

TOO_MUCH = {
    "huge range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "nested filtered loops": "{% for i in range(9999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}",
    "long output": "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}",
    "long capture": "{% set x %}{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}{% endset %}",
    "long macro": "{% macro m() %}{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    "{% endmacro %}{% set x = m() %}",
    "recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "doubling recursion": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "text times number": "{{ 'x' * 10**10 }}",
    "number times text": "{{ 10**10 * 'x' }}",
    "list times number": "{{ [0] * 10**10 }}",
    "huge power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "doubling by +": GROW % "ns.x + ns.x",
    "doubling by ~": GROW % "ns.x ~ ns.x",
    "doubling by replace": GROW % "ns.x.replace('a', ns.x)",
    "doubling by the replace filter": GROW % "ns.x | replace('b', ns.x)",
    "doubling by join": GROW % "ns.x.join(['a', 'b', 'c'])",
    "doubling by the join filter": GROW % "['a', 'b', 'c'] | join(ns.x)",
    "doubling by format": GROW % "'{0}{0}'.format(ns.x)",
    "doubling by %": GROW % "'%s%s' % (ns.x, ns.x)",
    "doubling by the format filter": GROW % "'%s%s' | format(ns.x, ns.x)",
    "doubling a list": GROW % "[ns.x, ns.x]",
    "doubling a list to JSON": (GROW % "[ns.x, ns.x]").replace("{{ ns.x }}", "{{ ns.x | tojson }}"),
    "doubling a list by +": GROW % "[ns.x] + [ns.x] * 2",
    "wide format": "{{ '{:10000000000}'.format(5) }}",
    "wide %": "{{ '%10000000000d' % 5 }}",
    "wide ljust": "{{ 'x'.ljust(10**10) }}",
    "wide center": "{{ 'x' | center(10000000000) }}",
    "wide indent": "{{ 'x\ny' | indent(10000000000) }}",
    "wide JSON": "{{ [1] | tojson(indent=10000000000) }}",
    "wide date": "{{ strftime_now('%1000000000d') }}",
    "equal lists that double": "{% set a = namespace(x=['ab'], y=['ab']) %}{% for i in range(30) %}"
    "{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}{% endfor %}{% if a.x == a.y %}1{% endif %}",
    "a text taken apart": "{% set s = 'ab ' * 10000000 %}{{ s.split() | length }}",
    "a text taken apart at letters": "{% set s = 'ab ' * 10000000 %}{{ s.split('a') | length }}",
    "a text in lines": "{% set s = 'a\n' * 15000000 %}{{ s.splitlines() | length }}",
    "a long text formatted": "{% set s = 'ab ' * 10000000 %}{{ s.format(1) }}",
    "slices in a row": "{% set s = 'ab ' * 10000000 %}" + "{% set s = s[1:] %}" * 500,
    "tests in a row": "{% set s = 'ab ' * 10000000 %}" + "{% if s is lower %}{% endif %}" * 500,
    "searches in a row": "{% set s = 'ab ' * 10000000 %}" + "{% if 'c' in s %}{% endif %}" * 500,
    "methods in a row": "{% set s = 'ab ' * 10000000 %}" + "{% set x = s.upper() %}" * 500,
    "mapped filter": "{{ ['x'] | map('center', 10000000000) | list }}",
}

FORBIDDEN = {
    "class": "{{ ''.__class__ }}",
    "subclasses": "{{ ().__class__.__base__.__subclasses__() }}",
    "by item": "{{ ''['__class__'] }}",
    "by filter": "{{ '' | attr('__class__') }}",
    "by format": "{{ '{0.__class__}'.format(messages) }}",
    "by map": "{{ [''] | map(attribute='__class__') | list | first | string }}{{ ''.__class__ }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "environment": "{{ self.__init__.__globals__ }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "namespace attribute": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "changing messages": "{{ messages.append(1) }}",
    "changing a message": "{{ messages[0].update({'role': 'x'}) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 9999}) }}",
    "including files": "{% include '/etc/passwd' %}",
    "lipsum": "{{ lipsum(n=9999) }}",
}


@pytest.mark.few(12)
@pytest.mark.parametrize("source", TOO_MUCH.values(), ids=TOO_MUCH.keys())
def test_a_template_that_asks_for_too_much_is_stopped(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.5)
    started = time.monotonic()
    with pytest.raises(TemplateError, match=r"was stopped: it") as caught:
        ChatTemplate(source).render(DIALOGUE)
    # Anything unbounded here would take hours or all memory.
    assert time.monotonic() - started < 60
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


ARGUMENTS = {
    "attr": "('x')", "batch": "(2)", "default": "('x')", "format": "(1)", "groupby": "(0)", "indent": "(2)",
    "join": "(',')", "map": "('upper')", "reject": "('string')", "rejectattr": "('a')", "replace": "('a', 'b')",
    "select": "('string')", "selectattr": "('a')", "slice": "(2)", "tojson": "(indent=1)", "wordwrap": "(3)",
}  # fmt: skip
LARGE = {
    "a text": "'ab c. ' * 5000000",
    "addresses": "'http://a.b/<x> ' * 2000000",
    "lines": "'a\n' * 16000000",
    "a list": "['ab', 'b'] * 49000",
    "lists": "[['ab', 'c'] * 500] * 500",
    "objects": "[{'a': 'b', 'c': {'d': 1}}] * 99000",
}


@pytest.mark.few(1)
@pytest.mark.parametrize("large", LARGE.values(), ids=LARGE.keys())
def test_every_filter_is_done_in_time_or_stopped(
    large: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest things a template can make: unbounded, some take minutes. Time is that of the
    processor, which others may be using and make slower.
    """
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    slow = {}
    for name in BoundedEnvironment(datetime.now).filters:
        template = ChatTemplate(
            f"{{% set s = {large} %}}{{% set r = s | {name}{ARGUMENTS.get(name, '')} | list %}}"
        )
        started = time.process_time()
        with contextlib.suppress(TemplateError):
            template.render(DIALOGUE)
        if (seconds := time.process_time() - started) > 3.0:
            slow[name] = seconds
    assert not slow


@pytest.mark.parametrize("source", FORBIDDEN.values(), ids=FORBIDDEN.keys())
def test_a_template_that_reaches_for_python_is_refused(source: str) -> None:
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source).render(DIALOGUE)
    assert "Traceback" not in str(caught.value)
    assert "<class" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('only users') }}", "refused the messages: only users"),
        ("{{ messages.nothing.more }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% if %}", "line 1"),
        ("a\n{{ 'x' | no_such_filter }}", "no_such_filter"),
        ("{% for a in b %}" * 40 + "{% endfor %}" * 40, "compiled"),
        ("{{ " + "(" * 5000 + ")" * 5000 + " }}", "compiled"),
        ("x" * (2 * 1024 * 1024), "longer than"),
    ],
)
def test_errors_in_templates_say_what_went_wrong(source: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        ChatTemplate(source).render(DIALOGUE)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for i in [1, 2, 3] %}{{ loop.index0 ~ '/' ~ loop.length }}{{ ',' if not loop.last }}{% endfor %}",
            "0/3,1/3,2/3",
        ),
        (
            "{% for i in range(9) if i % 2 %}{{ i }}{% if i > 4 %}{% break %}{% endif %}{% endfor %}",
            "135",
        ),
        (
            "{% for i in range(4) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}",
            "023",
        ),
        (
            "{% macro m(a, b='-') %}{{ b ~ a ~ b }}{% endmacro %}{{ m('x') }}{{ m('y', b='+') }}",
            "-x-+y+",
        ),
        ("{% generation %}a{% set q = 1 %}{% endgeneration %}{{ q is defined }}", "aFalse"),
        (
            "{{ {'a': '<é>'} | tojson }}{{ {'b': 1, 'a': [1, 2]} | tojson(indent=1, sort_keys=true) }}",
            None,
        ),
        (
            "{{ [1, 2] | tojson(separators=(',', ':')) }}{{ '€' | tojson(ensure_ascii=true) }}",
            '[1,2]"\\u20ac"',
        ),
        (
            "{{ 'a-b-c'.split('-') | join('+') }}{{ ' x '.strip() }}{{ 'ab'.replace('b', 'c') }}",
            "a+b+cxac",
        ),
        (
            "{{ 'x' * 3 ~ (1 + 2) }}{{ '%s-%02d' % ('a', 3) }}{{ '{}/{:>3}'.format(1, 2) }}",
            "xxx3a-031/  2",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        (
            "{{ dict(a=1).items() | list }}{{ 'ab' | indent(2, true) }}{{ 'q' | center(5) }}|",
            "[('a', 1)]  ab  q  |",
        ),
        ("  {% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
    ],
)
def test_what_templates_rely_on_works(source: str, expected: str | None) -> None:
    if expected is None:
        expected = '{"a": "<é>"}{\n "a": [\n  1,\n  2\n ],\n "b": 1\n}'
    assert ChatTemplate(source).render(DIALOGUE) == expected
