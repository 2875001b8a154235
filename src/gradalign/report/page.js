"use strict";
// Draws what series.py has worked out: nothing is computed here but what is shown and where.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const DASHES = ["solid", "dash", "dot", "dashdot"];
  const experiments = [];

  // plotly reads a few HTML tags in names; as entities they are letters again.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const faded = (colour, share) => colour + Math.round(255 * share).toString(16).padStart(2, "0");
  const make = (tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };

  const currentTheme = () =>
    root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");

  // A range for accuracies that shows how they differ: what lies after the curves' first climb, as in series.py.
  function closerRange(curves) {
    const late = curves.flatMap((curve) => curve.rounds.flatMap((round, i) => (4 * round >= curve.rounds.at(-1) ? [curve.low[i], curve.high[i]] : [])));
    if (!late.length) return undefined;
    const low = late.reduce((a, b) => Math.min(a, b)), high = late.reduce((a, b) => Math.max(a, b));
    const beyond = Math.max(0.05 * (high - low), 0.002);
    return [low - beyond, high + beyond];
  }

  function yValues(curves) {
    return curves.flatMap((curve) => [...curve.low, ...curve.high, ...curve.lines.flatMap((line) => line.y)]);
  }

  function traces(state, quantity, curves) {
    const found = [];
    curves.forEach((curve, index) => {
      if (!state.shown.has(index)) return;
      const group = state.experiment.groups[index];
      const line = {
        color: css(`--c${group.colour}`), dash: DASHES[group.dash], width: 2, shape: quantity.stepped ? "hv" : "linear",
      };
      const digits = quantity.percent ? ":.2%" : ":.4g", format = `%{y${digits}}`;
      const spread = group.seeds > 1 && !quantity.stepped ? `, %{customdata[1]${digits}} to %{customdata[2]${digits}}` : "";
      const common = { type: "scatter", name: plain(group.label), showlegend: false };
      const xs = curve.x[state.axis] || [];
      if (group.seeds > 1 && curve.mean.length && !quantity.stepped) {
        found.push({
          ...common, x: [...xs, ...[...xs].reverse()], y: [...curve.high, ...[...curve.low].reverse()], mode: "lines", fill: "toself",
          fillcolor: faded(line.color, 0.16), line: { width: 0 }, hoverinfo: "skip", meta: "band",
        });
      }
      // A run that did not finish is no part of the mean: it is drawn by itself, dotted, with a cross where it ended.
      for (const finished of [true, false]) {
        const lines = curve.lines.filter((one) => (one.state === "complete") === finished);
        if (!lines.length || (finished && !state.seeds)) continue;
        found.push({
          ...common, x: lines.flatMap((one) => [...one.x[state.axis], null]), y: lines.flatMap((one) => [...one.y, null]),
          mode: finished ? "lines" : "lines+markers", line: { ...line, width: 1, dash: finished ? "solid" : "dot" }, opacity: finished ? 0.6 : 0.9,
          marker: { symbol: "x", size: lines.flatMap((one) => [...one.y.map((_, i) => (i === one.y.length - 1 ? 9 : 0)), 0]) },
          text: lines.flatMap((one) => [...one.y.map(() => `seed ${one.seed}${finished ? "" : ", " + one.state}`), ""]),
          hovertemplate: `${format}, %{text}<extra>%{fullData.name}</extra>`, meta: finished ? "seeds" : "ended early",
        });
      }
      if (curve.mean.length) {
        found.push({
          ...common, x: xs, y: curve.mean, mode: curve.mean.length < 30 && !quantity.stepped ? "lines+markers" : "lines", line, marker: { size: 5, color: line.color },
          customdata: curve.rounds.map((round, i) => [round, curve.low[i], curve.high[i]]),
          hovertemplate: `${format}${spread}, round %{customdata[0]}<extra>%{fullData.name}</extra>`, meta: "mean",
        });
      }
    });
    return found;
  }

  function axisStyle(extra) {
    return { gridcolor: css("--grid"), linecolor: css("--line"), zerolinecolor: css("--line"), automargin: true, ...extra };
  }

  function baseLayout() {
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 13, family: "system-ui, sans-serif" },
      margin: { l: 60, r: 16, t: 16, b: 50 }, hovermode: "closest", showlegend: false, autosize: true,
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--accent") },
      hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { color: css("--ink") }, namelength: 60 },
    };
  }

  function layout(state, quantity, curves) {
    const values = yValues(curves);
    const logarithmic = quantity.logarithmic && state.log && values.length > 0 && values.every((value) => value > 0);
    const decades = logarithmic ? Math.log10(values.reduce((a, b) => Math.max(a, b)) / values.reduce((a, b) => Math.min(a, b))) : 0;
    const xFormat = { bytes: { tickformat: "~s", ticksuffix: "B" }, seconds: { ticksuffix: " s" }, examples: { tickformat: "~s" } }[state.axis] || { tickformat: ",~r" };
    return {
      ...baseLayout(),
      hovermode: "x unified", hoverdistance: 60,
      uirevision: `${quantity.key} ${state.axis} ${logarithmic} ${state.whole}`,
      xaxis: axisStyle({ title: { text: data.short_axes[state.axis] }, unifiedhovertitle: { text: `%{x} ${data.short_axes[state.axis]}` }, rangemode: "tozero", ...xFormat }),
      yaxis: axisStyle({
        title: { text: quantity.short || quantity.label }, type: logarithmic ? "log" : "linear", tickformat: quantity.percent ? ".1~%" : "~g",
        ...(logarithmic && decades < 3 ? { dtick: decades < 0.7 ? "D1" : "D2" } : {}), ...(quantity.stepped ? { rangemode: "tozero" } : {}),
        ...(quantity.percent ? { range: state.whole ? [0, 1] : closerRange(curves) } : {}),
      }),
    };
  }

  // The buttons are named one by one: plotly's own set has one that sends the chart to a server.
  const CONFIG = {
    responsive: true, displaylogo: false, plotlyServerURL: "", modeBarButtons: [["toImage", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
  };

  function shownKey(state, figure) {
    return figure === "choice" ? state.quantity : figure;
  }

  function describe(state, quantity, curves) {
    const words = [...state.shown].filter((index) => curves[index].mean.length).slice(0, 12).map((index) => {
      const last = curves[index].mean.at(-1);
      return `${state.experiment.groups[index].label} ends at ${quantity.percent ? (100 * last).toFixed(2) + " %" : last.toPrecision(4)}`;
    });
    return `${quantity.label} over ${data.axes[state.axis]}. ${words.join("; ")}.`;
  }

  function draw(state) {
    for (const place of state.section.querySelectorAll(".figure[data-figure]")) {
      const key = shownKey(state, place.dataset.figure);
      const quantity = data.quantities[key], curves = state.experiment.curves[key];
      const plot = place.querySelector(".plot");
      plot.setAttribute("aria-label", describe(state, quantity, curves));
      place.querySelector("h4").textContent = `${quantity.label} over ${data.short_axes[state.axis]}`;
      Plotly.react(plot, traces(state, quantity, curves), layout(state, quantity, curves.filter((_, index) => state.shown.has(index))), CONFIG);
      const numbers = place.querySelector("details");
      if (numbers.open) fillNumbers(state, numbers, key);
    }
    if (state.experiment.class_counts.length) drawClasses(state);
  }

  function drawClasses(state) {
    const place = state.section.querySelector(".classes");
    const found = state.experiment.class_counts[state.division];
    const counts = found.names.map((_, label) => found.counts.map((row) => row[label] || null));
    const there = found.counts.flat().filter((count) => count > 0), most = there.reduce((a, b) => Math.max(a, b), 1);
    // Where counts differ a lot, colours go by magnitude; the numbers shown are always the counts.
    const wide = most > 50 * there.reduce((a, b) => Math.min(a, b), most);
    const z = wide ? counts.map((row) => row.map((count) => count && Math.log10(count))) : counts;
    const ticks = wide ? { tickvals: [0, 1, 2, 3, 4, 5, 6].filter((power) => 10 ** power <= most), tickprefix: "10<sup>", ticksuffix: "</sup>" } : { nticks: 6, tickformat: "~s" };
    const dark = currentTheme() === "dark";
    const plot = place.querySelector(".plot");
    plot.style.height = `${Math.min(Math.max(320, 14 * found.names.length), 900)}px`;
    Plotly.react(plot, [{
      type: "heatmap", z, customdata: counts, zmin: 0, zmax: wide ? Math.log10(most) : most, y: found.names.map(plain), colorscale: "Viridis", reversescale: !dark, xgap: found.counts.length <= 60 ? 1 : 0, ygap: 1,
      colorbar: { title: { text: "examples", side: "right" }, thickness: 14, outlinewidth: 0, ...ticks }, hovertemplate: "client %{x}, class %{y}: %{customdata} examples<extra></extra>", hoverongaps: false,
    }], {
      ...baseLayout(),
      xaxis: axisStyle({ title: { text: "client" }, showgrid: false, zeroline: false }),
      yaxis: axisStyle({ title: { text: "class" }, type: "category", autorange: "reversed", showgrid: false, ...(found.names.length <= 60 ? { dtick: 1 } : {}) }),
    }, CONFIG);
  }

  function rowsOf(state, key) {
    const curves = state.experiment.curves[key];
    return [...state.shown].sort((a, b) => a - b).flatMap((index) => curves[index].rounds.map((round, point) => [
      state.experiment.groups[index].label, round, curves[index].x[state.axis][point],
      curves[index].mean[point], curves[index].low[point], curves[index].high[point],
    ]));
  }

  const headsOf = (state) => ["algorithm", "round", data.axes[state.axis], "mean over the seeds", "lowest", "highest"];

  function fillNumbers(state, details, key) {
    const quantity = data.quantities[key];
    const table = make("table"), head = make("tr"), body = make("tbody");
    table.append(make("caption", `${quantity.label} over ${data.axes[state.axis]}`));
    for (const name of headsOf(state)) head.append(make("th", name, { scope: "col" }));
    for (const row of rowsOf(state, key)) {
      const line = make("tr");
      row.forEach((value, column) => line.append(column ? make("td", value === null ? "–" : value) : make("th", value, { scope: "row" })));
      body.append(line);
    }
    const top = make("thead");
    top.append(head);
    table.append(top, body);
    const save = make("button", "Save as CSV", { type: "button", class: "download" });
    save.addEventListener("click", () => saveCsv(state, key));
    details.querySelector("div").replaceChildren(save, table);
  }

  function saveCsv(state, key) {
    // A name that begins like a formula would be one in a spreadsheet.
    const cell = (value) => {
      const text = value === null ? "" : typeof value === "string" ? value.replace(/^(?=[=+\-@])/, "'") : String(value);
      return `"${text.replace(/"/g, '""')}"`;
    };
    const lines = [headsOf(state), ...rowsOf(state, key)].map((row) => row.map(cell).join(","));
    const link = make("a", "", { download: `${key}.csv`, href: URL.createObjectURL(new Blob([lines.join("\r\n") + "\r\n"], { type: "text/csv" })) });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function setUp(section, experiment) {
    const state = {
      section, experiment, quantity: experiment.choices[0], axis: "communication_rounds", seeds: false, log: true, whole: false, division: 0,
      shown: new Set(experiment.shown),
    };
    const buttons = [...section.querySelectorAll(".legend button[data-group]")];
    const refresh = () => {
      for (const button of buttons) button.setAttribute("aria-pressed", String(state.shown.has(Number(button.dataset.group))));
      const count = section.querySelector(".shown-count");
      if (count) count.textContent = `${state.shown.size} of ${experiment.groups.length} shown`;
      draw(state);
    };
    section.addEventListener("change", (event) => {
      const field = event.target.dataset.state;
      if (field) { state[field] = field === "division" ? Number(event.target.value) : event.target.value; draw(state); }
    });
    for (const button of buttons) {
      button.addEventListener("click", () => {
        const group = Number(button.dataset.group);
        if (!state.shown.delete(group)) state.shown.add(group);
        refresh();
      });
    }
    for (const button of section.querySelectorAll("button[data-show]")) {
      button.addEventListener("click", () => {
        const which = button.dataset.show;
        state.shown = new Set(which === "all" ? experiment.groups.keys() : which === "best" ? experiment.best : []);
        refresh();
      });
    }
    for (const button of section.querySelectorAll("button.mode")) {
      button.addEventListener("click", () => {
        state[button.dataset.mode] = !state[button.dataset.mode];
        button.setAttribute("aria-pressed", String(state[button.dataset.mode]));
        draw(state);
      });
    }
    for (const details of section.querySelectorAll(".figure[data-figure] details")) {
      details.addEventListener("toggle", () => {
        if (details.open) fillNumbers(state, details, shownKey(state, details.closest(".figure").dataset.figure));
      });
    }
    refresh();
    experiments.push(state);
  }

  const drawAll = () => experiments.forEach(draw);

  function setUpTheme() {
    const button = document.querySelector(".theme");
    const name = () => { button.textContent = currentTheme() === "dark" ? "Light page" : "Dark page"; };
    button.hidden = false;
    button.addEventListener("click", () => {
      root.dataset.theme = currentTheme() === "dark" ? "light" : "dark";
      name();
      drawAll();
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { name(); drawAll(); });
    name();
  }

  function setUpPrinting() {
    let before;
    const resize = (width) => {
      for (const plot of document.querySelectorAll(".plot.js-plotly-plot")) Plotly.relayout(plot, width ? { width, autosize: false } : { width: null, autosize: true });
    };
    addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      root.dataset.theme = "light";
      drawAll();
      resize(670);
    });
    addEventListener("afterprint", () => {
      if (before === undefined) delete root.dataset.theme; else root.dataset.theme = before;
      drawAll();
      resize(null);
    });
  }

  setUpTheme();
  document.querySelectorAll("section[data-experiment]").forEach((section) => setUp(section, data.experiments[Number(section.dataset.experiment)]));
  setUpPrinting();
  root.dataset.ready = "true";
})();
