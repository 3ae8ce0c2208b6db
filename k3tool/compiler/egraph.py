"""Equality saturation with egglog: which other ops could make each value of a graph.

The graph and the rules go in as generated egglog text; the saturated e-graph comes out serialized
and is mapped back to graph ids, so that nothing depends on egglog's own numbering and no extracted
term is ever printed (a shared graph printed as a term is exponential). Choosing is `extract`'s job.

A class of equal values is named by the smallest graph node in it. Values inside a rule's right side
may be new: their classes are numbered behind the nodes, in an order that depends on their forms
alone.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from k3tool.compiler.patterns import Rule, Term
from k3tool.errors import K3Error
from k3tool.isa.table import Op
from k3tool.model.nodes import Graph, Leaf, Node
from k3tool.model.operators import attr_names, input_operands
from k3tool.threads import require_thread

require_thread()  # first: loading egglog without one prints a backtrace of Rust
from egglog.bindings import EGraph as Engine  # noqa: E402


class Form(NamedTuple):
    """One way to make a value: an op or leaf over classes."""

    op: Op | Leaf
    inputs: tuple[int, ...]
    attrs: tuple[int | str, ...]


class Made(NamedTuple):
    """A form that a rule made, and the class it makes."""

    cls: int
    form: Form


@dataclass(frozen=True, slots=True)
class Application:
    """One firing of a rule: what its variables stood for, and the forms it made.

    `made` has one entry per equation of the rule, at the class that was rewritten; `inner` the new
    values inside right sides; `matched` every term of the left sides.
    """

    rule: Rule
    values: Mapping[str, int]  # variable -> class
    numbers: Mapping[str, int]  # variable -> attribute
    made: tuple[Made, ...]
    inner: tuple[Made, ...] = ()
    matched: tuple[Made, ...] = ()


@dataclass(slots=True)
class Saturated:
    """All forms of every class, and every rule application, in an order that only depends on them.

    `class_of[node]` is the class of a graph node, `forms[cls]` its ways to be made. A class that
    is not smaller than `len(class_of)` is a new value.
    """

    class_of: list[int]
    forms: dict[int, list[Form]]
    applications: list[Application] = field(default_factory=list)


def saturate(graph: Graph, rules: Sequence[Rule]) -> Saturated:
    """Return the e-graph of a graph under rules.

    Raises: K3Error if egglog refuses the program, which is a fault of ours.
    """
    engine = Engine()
    programs = ["\n".join((*_declarations(), *map(_rule_text, rules))), *_facts(graph)]
    programs += ["(run load 1)", "(run-schedule (saturate (run rewrite)))"]
    try:
        for program in programs:
            engine.run_program(*engine.parse_program(program))
        serialized = engine.serialize([], max_functions=None, max_calls_per_function=None)
    except Exception as error:
        raise K3Error("e-graph", got=f"egglog: {error}", need="a valid program") from error
    return _mapped(graph, rules, json.loads(serialized.to_json()))


# -- the program -----------------------------------------------------------------------------------

_NODE = "node"
_FACTS_PER_RULE = 8
_FIRED = "fired-"  # one relation per rule: root classes, then the rule's variables


def _declarations() -> Iterator[str]:
    yield "(sort Value)"
    for leaf in Leaf:
        yield f"(constructor {leaf.value} (String) Value)"
    for op in Op:
        sorts = ["Value"] * len(input_operands(op)) + ["i64"] * len(attr_names(op))
        yield f"(constructor {op.name} ({' '.join(sorts)}) Value)"
    yield f"(constructor {_NODE} (i64) Value)"  # equal to what graph node i is made by
    yield "(ruleset rewrite)"
    yield "(ruleset load)"


def _rule_text(rule: Rule) -> str:
    values, numbers = rule.value_variables(), rule.attr_variables()
    roots = [f"root{i}" for i in range(len(rule.equations))]
    sorts = ["Value"] * (len(roots) + len(values)) + ["i64"] * len(numbers)
    named = [term for top in rule.premises() for term in top.subterms() if term.name]
    premises = [f"(= ?{term.name} {_pattern(term)})" for term in named]
    actions = []
    for root, (left, right) in zip(roots, rule.equations, strict=True):
        premises.append(f"(= ?{root} {_pattern(left)})")
        actions.append(f"(union ?{root} {_pattern(right)})")
    premises += [f"(= ?where{i} {_pattern(term)})" for i, term in enumerate(rule.where)]
    bound = " ".join(f"?{name}" for name in (*roots, *values, *numbers))
    actions.append(f"({_FIRED}{rule.name} {bound})")
    return (
        f"(relation {_FIRED}{rule.name} ({' '.join(sorts)}))\n"
        f"(rule ({' '.join(premises)}) ({' '.join(actions)})"
        f' :ruleset rewrite :name "{rule.name}")'
    )


def _pattern(term: Term) -> str:
    """Return a term as egglog text; variables get a `?`, so that none shadows a constructor."""
    words = [term.op.name]
    for item in (*term.inputs, *term.attrs):
        if isinstance(item, Term):
            words.append(f"?{item.name}" if item.name else _pattern(item))
        else:
            words.append(f"?{item}" if isinstance(item, str) else str(item))
    return f"({' '.join(words)})"


def _facts(graph: Graph) -> Iterator[str]:
    """Yield programs that enter the graph: a few nodes per rule without premises.

    egglog compiles every command: one `let` per node took 0.65 ms each (5 s on the released model)
    and a program of many of them quadratic time and memory; eight per rule take 0.4 s in all.
    """
    facts = [f"(union ({_NODE} {i}) {_made(node)})" for i, node in enumerate(graph.nodes)]
    for first in range(0, len(facts), _FACTS_PER_RULE):
        actions = " ".join(facts[first : first + _FACTS_PER_RULE])
        yield f'(rule () ({actions}) :ruleset load :name "load-{first}")'


def _made(node: Node) -> str:
    if isinstance(node.op, Leaf):
        return f"({node.op.value} {json.dumps(node.attrs[0][1])})"
    words = [f"({_NODE} {i})" for i in node.inputs] + [str(value) for _, value in node.attrs]
    return f"({' '.join([node.op.name, *words])})"


# -- back to graph ids -----------------------------------------------------------------------------


def _mapped(graph: Graph, rules: Sequence[Rule], data: Mapping[str, Any]) -> Saturated:
    nodes: Mapping[str, Any] = data["nodes"]
    kinds: dict[str, Op | Leaf] = {op.name: op for op in Op}
    kinds |= {leaf.value: leaf for leaf in Leaf}
    table: dict[tuple[Op | Leaf, tuple[str | int, ...]], str] = {}  # form -> egglog class
    for entry in nodes.values():
        kind = kinds.get(entry["op"])
        if kind is not None:
            table[kind, _children(nodes, entry)] = str(entry["eclass"])
    class_of, names = _class_names(nodes, len(graph.nodes))
    _name_new(table, names, len(graph.nodes))
    forms: dict[int, list[Form]] = {}
    for (kind, children), eclass in table.items():
        forms.setdefault(names[eclass], []).append(_form(kind, children, names))
    for members in forms.values():
        members.sort(key=_form_key)
    out = Saturated(class_of, dict(sorted(forms.items())))
    of_form = {form: name for name, members in forms.items() for form in members}
    by_relation = {_FIRED + rule.name: rule for rule in rules}
    fired = [
        _application(by_relation[entry["op"]], _children(nodes, entry), names, of_form)
        for entry in nodes.values()
        if entry["op"] in by_relation
    ]
    out.applications = sorted(fired, key=_application_key)
    return out


def _application_key(a: Application) -> tuple[list[int], str, list[tuple[object, ...]]]:
    roots = [made.cls for made in a.made]
    return roots, a.rule.name, [_form_key(made.form) for made in a.made]


def _name_new(
    table: Mapping[tuple[Op | Leaf, tuple[str | int, ...]], str], names: dict[str, int], free: int
) -> None:
    """Number the classes without a graph node from `free` on, each behind those it reads."""
    pending: dict[str, list[tuple[Op | Leaf, tuple[str | int, ...]]]] = {}
    for key, eclass in table.items():
        if eclass not in names:
            pending.setdefault(eclass, []).append(key)
    while pending:
        ready = []
        for eclass, keys in pending.items():
            if all(_is_named(key, names) for key in keys):
                ready.append((min(_form_key(_form(*key, names)) for key in keys), eclass))
        assert ready, "new values that read each other"
        for _, eclass in sorted(ready):
            names[eclass], free = free, free + 1
            del pending[eclass]


def _is_named(key: tuple[Op | Leaf, tuple[str | int, ...]], names: Mapping[str, int]) -> bool:
    kind, children = key
    split = 0 if isinstance(kind, Leaf) else len(input_operands(kind))
    return all(str(child) in names for child in children[:split])


def _children(nodes: Mapping[str, Any], entry: Mapping[str, Any]) -> tuple[str | int, ...]:
    """Return children as class ids (str) and literals (int, or str in double quotes)."""
    out: list[str | int] = []
    for child in entry["children"]:
        node = nodes[child]
        literal = node["op"]
        if literal.lstrip("-").isdigit():
            out.append(int(literal))
        else:
            out.append(literal if literal.startswith('"') else str(node["eclass"]))
    return tuple(out)


def _class_names(nodes: Mapping[str, Any], n_nodes: int) -> tuple[list[int], dict[str, int]]:
    """Return each graph node's class, and the name (smallest node) of egglog's class ids."""
    eclass = [""] * n_nodes
    for entry in nodes.values():
        if entry["op"] == _NODE:
            eclass[int(_children(nodes, entry)[0])] = str(entry["eclass"])
    names: dict[str, int] = {}
    for index, found in enumerate(eclass):
        assert found, f"graph node {index} is not in the e-graph"
        names.setdefault(found, index)
    return [names[found] for found in eclass], names


def _form(kind: Op | Leaf, children: Sequence[str | int], names: Mapping[str, int]) -> Form:
    if isinstance(kind, Leaf):
        return Form(kind, (), (json.loads(str(children[0])),))
    split = len(input_operands(kind))
    inputs = tuple(names[str(child)] for child in children[:split])
    return Form(kind, inputs, tuple(int(child) for child in children[split:]))


def _form_key(form: Form) -> tuple[str, tuple[int, ...], str]:
    return (str(form.op), form.inputs, str(form.attrs))


def _application(
    rule: Rule,
    children: Sequence[str | int],
    names: Mapping[str, int],
    of_form: Mapping[Form, int],
) -> Application:
    value_names, number_names = rule.value_variables(), rule.attr_variables()
    roots = len(rule.equations)
    split = roots + len(value_names)
    classes = [names[str(child)] for child in children[:split]]
    values = dict(zip(value_names, classes[roots:], strict=True))
    numbers = dict(zip(number_names, (int(x) for x in children[split:]), strict=True))
    made: list[Made] = []
    inner: list[Made] = []
    matched: list[Made] = []
    for root, (left, right) in zip(classes, rule.equations, strict=False):
        _instance(left, values, numbers, of_form, matched)
        parts: list[Made] = []
        made.append(Made(root, _instance(right, values, numbers, of_form, parts)))
        inner += parts[:-1]
    unique = tuple(dict.fromkeys(inner))
    return Application(rule, values, numbers, tuple(made), unique, tuple(dict.fromkeys(matched)))


def _instance(
    term: Term,
    values: Mapping[str, int],
    numbers: Mapping[str, int],
    of_form: Mapping[Form, int],
    found: list[Made],
) -> Form:
    """Return the form a pattern stands for under a substitution; collect those inside it."""
    inputs = []
    for item in term.inputs:
        if isinstance(item, str):
            inputs.append(values[item])
        else:
            inputs.append(of_form[_instance(item, values, numbers, of_form, found)])
    attrs = tuple(numbers[a] if isinstance(a, str) else a for a in term.attrs)
    form = Form(term.op, tuple(inputs), attrs)
    found.append(Made(of_form[form], form))
    return form
