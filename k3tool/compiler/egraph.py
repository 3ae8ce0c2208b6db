"""Equality saturation with egglog: which other ops could make each value of a graph.

The graph and the rules go in as generated egglog text; the saturated e-graph comes out serialized
and is mapped back to graph ids, so that nothing depends on egglog's own numbering and no extracted
term is ever printed (a shared graph printed as a term is exponential). Choosing is `extract`'s job.

A class of equal values is named by the smallest graph node in it. Every class has one, because a
rule's right side is a single op that is made equal to an existing value.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from egglog.bindings import EGraph as Engine

from k3tool.compiler.rules import Rule, Term
from k3tool.errors import K3Error
from k3tool.isa.table import Op
from k3tool.model.nodes import Graph, Leaf, Node
from k3tool.model.operators import attr_names, input_operands


class Form(NamedTuple):
    """One way to make a value: an op or leaf over classes."""

    op: Op | Leaf
    inputs: tuple[int, ...]
    attrs: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Application:
    """One firing of a rule at a class: what its variables stood for, and the form it made."""

    rule: Rule
    root: int
    values: Mapping[str, int]  # variable -> class
    numbers: Mapping[str, int]  # variable -> attribute
    made: Form
    matched: tuple[tuple[int, Form], ...] = ()  # class and form of every term of the left side


@dataclass(slots=True)
class Saturated:
    """All forms of every class, and every rule application, in an order that only depends on them.

    `class_of[node]` is the class of a graph node, `forms[cls]` its ways to be made.
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
_FIRED = "fired-"  # one relation per rule: root class, then the rule's variables


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
    values, numbers = _variables(rule)
    sorts = ["Value"] * (1 + len(values)) + ["i64"] * len(numbers)
    named = [term for term in rule.left.subterms() if term.name]
    premises = [f"(= ?{term.name} {_pattern(term)})" for term in named]
    premises.append(f"(= ?root {_pattern(rule.left)})")
    fired = f"({_FIRED}{rule.name} {' '.join(f'?{v}' for v in ('root', *values, *numbers))})"
    return (
        f"(relation {_FIRED}{rule.name} ({' '.join(sorts)}))\n"
        f"(rule ({' '.join(premises)}) ((union ?root {_pattern(rule.right)}) {fired})"
        f' :ruleset rewrite :name "{rule.name}")'
    )


def _variables(rule: Rule) -> tuple[list[str], list[str]]:
    return rule.left.value_variables(), rule.left.attr_variables()


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
    forms: dict[int, list[Form]] = {}
    for (kind, children), eclass in table.items():
        assert eclass in names, f"{kind}: a class without a graph node"
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
    out.applications = sorted(fired, key=lambda a: (a.root, a.rule.name, _form_key(a.made)))
    return out


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


def _form(
    kind: Op | Leaf, children: Sequence[str | int], names: Mapping[str, int]
) -> Form:
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
    value_names, number_names = _variables(rule)
    split = 1 + len(value_names)
    classes = [names[str(child)] for child in children[:split]]
    values = dict(zip(value_names, classes[1:], strict=True))
    numbers = dict(zip(number_names, (int(x) for x in children[split:]), strict=True))
    matched: list[tuple[int, Form]] = []
    _instance(rule.left, values, numbers, of_form, matched)
    made = _instance(rule.right, values, numbers, of_form, [])
    return Application(rule, classes[0], values, numbers, made, tuple(matched))


def _instance(
    term: Term,
    values: Mapping[str, int],
    numbers: Mapping[str, int],
    of_form: Mapping[Form, int],
    found: list[tuple[int, Form]],
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
    found.append((of_form[form], form))
    return form


