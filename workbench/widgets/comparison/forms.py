"""Forms of ipywidgets for the settings of wrappers, made from `Setting`s; the entries are read back as a `Part`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .settings import Part, Setting, settings_of, summary

_DEFAULT = "the default"  # stands for None, which a dropdown would show as no selection
_NUMBER = "a number"  # choice whose value is in the number box below
_WIDE = {"description_width": "8.5rem"}
_LAYOUT = {"width": "auto"}


class Form:
    """The settings of one part as controls.

    Args:
        part: class and initial values; values that no control can show are kept unchanged.
        task: "regression" or "classification".
        on_change: called without arguments after an entry was changed.

    Attributes:
        controls: control of each setting, by name (the dropdown, if there is a number box as well).
        box: widget with all controls.
    """

    def __init__(self, part: Part, task: str | None = None, on_change: Callable[[], Any] = lambda: None) -> None:
        import ipywidgets as w

        self.cls, self._task, self._on_change = part.cls, task, on_change
        self._settings = {setting.name: setting for setting in settings_of(part.cls, task)}
        self._defaults = {setting.name: setting.default for setting in settings_of(part.cls)}
        self._kept = {name: value for name, value in part.values.items() if name not in self._settings}
        self.controls: dict[str, Any] = {}
        self._numbers: dict[str, Any] = {}
        self._inside: dict[str, Form] = {}
        self.box = w.VBox([])
        for name, setting in self._settings.items():
            value = part.values.get(name, setting.default)
            if not self._make(setting, value):
                self._kept[name] = value
                self.controls[name] = w.Text(repr(value), disabled=True, description=name, style=_WIDE, layout=_LAYOUT)
        for name, value in self._kept.items():
            if name not in self.controls:
                self.controls[name] = w.Text(repr(value), disabled=True, description=name, style=_WIDE, layout=_LAYOUT)
        for control in [*self.controls.values(), *self._numbers.values()]:
            control.observe(lambda _: self._on_change(), "value")
        self._arrange()

    def _make(self, setting: Setting, value: Any) -> bool:
        """Make the control of a setting; return whether it can show the value."""
        import ipywidgets as w

        style = {
            "description": setting.name,
            "tooltip": f"{setting.name}: {setting.help}",
            "style": _WIDE,
            "layout": _LAYOUT,
        }
        if setting.menu == (True, False):
            self.controls[setting.name] = w.Checkbox(bool(value), indent=True, **style)
        elif setting.text:
            text = "" if value is None else ", ".join(value) if isinstance(value, list | tuple) else value
            if not isinstance(text, str):
                return False
            self.controls[setting.name] = w.Text(text, placeholder="the default", continuous_update=False, **style)
        elif setting.menu:
            return self._make_choice(setting, value, style)
        elif setting.number is not None and isinstance(value, int | float):
            self.controls[setting.name] = self._box(setting, value, style)
        else:
            return False
        return True

    def _make_choice(self, setting: Setting, value: Any, style: dict[str, Any]) -> bool:
        import ipywidgets as w

        options = [(_label(choice), _DEFAULT if choice is None else choice) for choice in setting.menu]
        number = None
        inside = self._inner(setting, value)
        if inside is not None:
            value, self._inside[setting.name] = inside.cls, inside
        if setting.number is not None:
            options.append((_NUMBER, _NUMBER))
            if value not in setting.menu:
                number, value = value, _NUMBER
        value = _DEFAULT if value is None else value
        if value not in [choice for _, choice in options]:
            return False
        self.controls[setting.name] = choice = w.Dropdown(options=options, value=value, **style)
        if setting.number is not None:
            start = number if number is not None else max(setting.least or 1, 1)
            box = self._box(setting, start, {**style, "description": " "})
            self._numbers[setting.name] = box
        choice.observe(lambda change: self._chosen(setting, change["new"]), "value")
        return True

    def _box(self, setting: Setting, value: Any, style: dict[str, Any]) -> Any:
        import ipywidgets as w

        if setting.number is int:
            return w.BoundedIntText(value, min=setting.least or 0, max=10**6, **style)
        return w.FloatText(value, **style)

    def _inner(self, setting: Setting, value: Any) -> Form | None:
        """Return the form of a class among the choices, if the value is that class or an instance the form can show."""
        cls = value if isinstance(value, type) else value.cls if isinstance(value, Part) else type(value)
        if cls not in setting.menu or value is None or isinstance(value, bool | str | int | float):
            return None
        if isinstance(value, type):
            return Form(Part(cls), self._task, self._on_change)
        if isinstance(value, Part):
            return Form(value, self._task, self._on_change)
        values = {inner.name: getattr(value, inner.name, inner.default) for inner in settings_of(cls)}
        part = Part(
            cls, {inner.name: values[inner.name] for inner in settings_of(cls) if values[inner.name] != inner.default}
        )
        return Form(part, self._task, self._on_change) if repr(part.build()) == repr(value) else None

    def _chosen(self, setting: Setting, value: Any) -> None:
        self._inside.pop(setting.name, None)
        if isinstance(value, type):
            self._inside[setting.name] = Form(Part(value), self._task, self._on_change)
        self._arrange()

    def _arrange(self) -> None:
        children: list[Any] = []
        for name, control in self.controls.items():
            children.append(control)
            if name in self._numbers and control.value == _NUMBER:
                children.append(self._numbers[name])
            if name in self._inside:
                children.extend(self._inside[name].box.children)
        self.box.children = children

    def part(self) -> Part:
        """Return the class with the settings that differ from its defaults."""
        values = dict(self._kept)
        for name, setting in self._settings.items():
            if name in self._kept:
                continue
            value, default = self._value(setting), self._defaults[name]
            if isinstance(value, Part) and not value.values and value.cls is default:
                continue
            if type(value) is not type(default) or value != default:
                values[name] = value
        return Part(self.cls, values)

    def _value(self, setting: Setting) -> Any:
        value = self.controls[setting.name].value
        if setting.name in self._inside:
            return self._inside[setting.name].part()
        if setting.name in self._numbers and value == _NUMBER:
            return self._numbers[setting.name].value
        if value == _DEFAULT and not setting.text:
            return None
        if setting.text:
            words = [word.strip() for word in value.split(",") if word.strip()]
            return (words or None) if setting.several else (", ".join(words) or None)
        return value


def _label(choice: Any) -> str:
    return choice.__name__ if isinstance(choice, type) else _DEFAULT if choice is None else str(choice)


class CandidateForm:
    """The settings of all parts of a candidate, with a one-line summary of each."""

    def __init__(self, parts: list[Part], task: str | None, on_change: Callable[[], Any] = lambda: None) -> None:
        import html

        import ipywidgets as w

        self.forms = [Form(part, task, on_change) for part in parts]
        children: list[Any] = []
        for form in self.forms:
            children += [w.HTML(f"<p class='wb-help'>{html.escape(summary(form.cls))}</p>"), form.box]
        if not parts:
            children = [
                w.HTML("<p class='wb-help'>The plain model, the baseline of all others. It has no settings.</p>")
            ]
        self.box = w.VBox(children).add_class("wb-form")

    def parts(self) -> list[Part]:
        """Return the parts as entered."""
        return [form.part() for form in self.forms]
