"""The HTML of what a reader needs to trust and repeat an experiment: settings, recipe, commands, folders."""

from __future__ import annotations

import base64

from gradalign.report.experiments import Experiment, settings_of, shown_value
from gradalign.report.markup import folded, heads, text, text_lines, wide_table
from gradalign.report.repeat import Repeat, how_to_repeat


def settings_part(experiment: Experiment) -> str:
    """Return the settings that all groups share, and a table of those in which they differ."""
    groups = [settings_of(group.runs[0]) for group in experiment.groups]
    keys = list(dict.fromkeys(key for settings in groups for key in settings))
    shared = [key for key in keys if all(key in s and s[key] == groups[0][key] for s in groups)]
    pairs = list(zip(experiment.groups, groups, strict=True))
    named = all(settings.get("algorithm.name") == group.label for group, settings in pairs)
    own = [key for key in keys if key not in shared and not (named and key == "algorithm.name")]
    rows = "".join(
        f'<tr><th scope="row">{text(key)}</th><td class="text">{text(shown_value(groups[0][key]))}</td></tr>'
        for key in shared
    )
    lines = "".join(
        f'<tr><th scope="row">{text(group.label)}</th>'
        + "".join(f"<td>{text(shown_value(settings[key]) if key in settings else '–')}</td>" for key in own)
        + "</tr>"
        for group, settings in pairs
    )
    caption = "<caption>Settings in which they differ</caption>"
    content = f"{caption}{heads('algorithm', *own)}<tbody>{lines}</tbody>"
    differing = folded("Settings in which they differ", wide_table("Differing settings", content), len(groups))
    differing = differing if own and len(groups) > 1 else ""
    return (
        f"<h3>Settings</h3>{differing}<details><summary>Settings that all share</summary><div><table>"
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _how(repeat: Repeat) -> str:
    if repeat.outside:
        tasks = ", ".join(f"<code>{text(name)}</code>" for name in repeat.outside)
        return (
            f"The recipe below names code that does not come with gradalign: {tasks}. Running it runs that code, "
            "so do it only with a task whose code you have and know."
        )
    return (
        f"Save the recipe as {text(repeat.file_name)} and run it. One run alone is repeated "
        "with <code>gradalign run FOLDER/spec.toml</code>."
    )


def repeat_part(experiment: Experiment) -> str:
    """Return the recipe and the commands that give these runs again, and where they lie."""
    repeat = how_to_repeat(experiment)
    folders = "".join(
        f'<tr><th scope="row">{text(group.label)}</th><td>{run.seed}</td><td class="text">{run.state}</td>'
        f'<td class="text"><code>{text(run.folder)}</code></td></tr>'
        for group in experiment.groups
        for run in group.runs
    )
    listed = (
        f"<details><summary>Run folders</summary><div><table>{heads('algorithm', 'seed', 'state', 'folder')}"
        f"<tbody>{folders}</tbody></table></div></details>"
    )
    if repeat.recipe is None:
        words = "These runs were made from Python with gradalign.run, not from a recipe; their settings are above."
        return f"<h3>To repeat it</h3><p>{words}</p>{listed}"
    link = base64.b64encode(repeat.recipe.encode("utf-8", errors="replace")).decode()
    download = f'download="{text(repeat.file_name)}" href="data:text/plain;base64,{link}"'
    commands = f"<pre><code>{text_lines(repeat.commands)}</code></pre>" if repeat.commands else ""
    return (
        f"<h3>To repeat it</h3><p>{_how(repeat)}</p>{commands}"
        f'<p><a class="download" {download}>Save the recipe</a></p>'
        f"<details><summary>The recipe</summary><div><pre><code>{text_lines(repeat.recipe.splitlines())}</code></pre>"
        f"</div></details>{listed}"
    )
