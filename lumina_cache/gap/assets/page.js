"use strict";
(() => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  const root = document.documentElement;
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 760px)");
  const coarse = matchMedia("(pointer: coarse)");
  const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "x", "star", "cross", "triangle-down"];
  const PATHS = {
    circle: "M11 6a4 4 0 1 0 .001 0z", square: "M7 6h8v8h-8z", diamond: "M11 5l5 5-5 5-5-5z",
    "triangle-up": "M11 5l5 9h-10z", x: "M7 7l8 8M15 7l-8 8", star: "M11 5l1.5 4h4l-3 2.500 1 4-3.500-2.500-3.500 2.500 1-4-3-2.500h4z",
    cross: "M11 5v10M6 10h10", "triangle-down": "M11 15l5-9h-10z",
  };
  const colour = (name) => getComputedStyle(root).getPropertyValue(name).trim();
  const escape = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const shorten = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);

  /** Labels in lines that fit the width; plotly.js breaks none by itself. */
  function wrap(text, width) {
    const lines = [];
    let line = "";
    for (const piece of text.match(/\S+\s*/g) || []) {
      for (let rest = piece; rest; ) {
        if (line && line.length + rest.trimEnd().length > width) { lines.push(line.trimEnd()); line = ""; }
        line += rest.slice(0, width);
        rest = rest.slice(width);
      }
    }
    if (line) lines.push(line.trimEnd());
    return lines.map(escape).join("<br>");
  }

  /** Categories become 0, 1, 2 …, so that points can be moved aside on every kind of axis. */
  function places(view, axis) {
    if (axis.kind !== "category") return null;
    const names = [...new Set(view.series.flatMap((s) => s.x))];
    return { names, at: new Map(names.map((name, i) => [name, i])) };
  }

  function traces(view, hidden, width) {
    const category = places(view, view.x);
    return view.series.map((s, i) => {
      const paint = colour(`--c${s.colour % 8}`);
      const x = s.x.map((value) => {
        if (category) return category.at.get(value) + (s.kind === "bars" ? 0 : 0.02 * s.offset);
        return view.x.kind === "log" ? value * Math.pow(1.008, s.offset) : value;
      });
      const error = s.low.length ? {
        type: "data", symmetric: false, color: paint, thickness: 1.3, width: 3, visible: true,
        array: s.y.map((y, k) => (s.high[k] === null || y === null ? 0 : s.high[k] - y)),
        arrayminus: s.y.map((y, k) => (s.low[k] === null || y === null ? 0 : y - s.low[k])),
      } : undefined;
      const common = {
        name: s.name, visible: hidden.has(s.name) ? false : true, showlegend: false,
        text: s.labels.map((l) => wrap(l, width < 500 ? 34 : 60)), hovertemplate: "%{text}<extra></extra>",
      };
      if (s.kind === "bars") {
        const bars = { ...common, type: "bar", textposition: "none", marker: { color: paint } };
        if (error) error.color = colour("--ink");
        return view.horizontal
          ? { ...bars, orientation: "h", x: s.y, y: x, error_x: error }
          : { ...bars, x, y: s.y, error_y: error };
      }
      const lines = s.kind !== "points";
      return {
        ...common, type: "scatter", mode: lines ? "lines+markers" : "markers", x, y: s.y, error_y: error,
        connectgaps: false,
        line: { color: paint, width: 2, dash: s.dashed ? "dash" : "solid", shape: s.kind === "steps" ? "hv" : "linear" },
        marker: { color: paint, symbol: SYMBOLS[i % SYMBOLS.length], size: s.kind === "steps" ? 4 : lines ? 7 : 8, opacity: 0.9 },
      };
    });
  }

  function axis(view, spec, width, isY) {
    const ink = colour("--ink"), line = colour("--line");
    const made = {
      title: { text: escape(spec.title), font: { size: 13 }, standoff: 8 }, type: spec.kind === "log" ? "log" : "linear",
      gridcolor: line, zerolinecolor: line, linecolor: line, tickfont: { size: width < 500 ? 11 : 12 }, color: ink,
      automargin: true, autorange: spec.descending ? "reversed" : true, hoverformat: ".4g",
    };
    const category = places(view, spec);
    if (category) {
      made.tickvals = category.names.map((_, i) => i);
      const most = isY ? (width < 500 ? 18 : 34) : width < 500 ? 12 : 20;
      made.ticktext = category.names.map((name) => escape(shorten(String(name), most)));
      made.zeroline = false;
      made.showgrid = false;
      if (isY) made.autorange = "reversed";
    } else if (spec.ticks.length) {
      made.tickvals = spec.ticks.map((t) => t[0]);
      made.ticktext = spec.ticks.map((t) => escape(t[1]).replace("\n", "<br>"));
      made.tickangle = 0;
      if (spec.descending) {
        // All of them, so that a place without a point is seen to be empty.
        const values = made.tickvals.map((v) => (spec.kind === "log" ? Math.log10(v) : v));
        const [low, high] = [Math.min(...values), Math.max(...values)];
        const room = 0.08 * (high - low || 1);
        made.range = [high + room, low - room];
        made.autorange = false;
      }
    } else if (spec.kind === "log") {
      const values = view.series.flatMap((one) => (isY === view.horizontal ? one.x : one.y)).filter((v) => v > 0);
      if (Math.max(...values) / Math.min(...values) < 40) {
        made.dtick = "D2";
        made.tickformat = ".2~g";
      } else {
        made.dtick = 1;
        made.exponentformat = "power";
      }
    }
    return made;
  }

  function layout(view, width) {
    const ink = colour("--ink"), faint = colour("--faint");
    const across = { type: "line", line: { color: faint, width: 1.3, dash: "dot" } };
    const shapes = [
      ...view.lines.map(([at]) => ({ ...across, xref: "paper", x0: 0, x1: 1, y0: at, y1: at })),
      ...view.uprights.map(([at]) => ({ ...across, yref: "paper", y0: 0, y1: 1, x0: at, x1: at })),
    ];
    const note = { showarrow: false, font: { size: 11, color: faint } };
    const logged = (spec, value) => (spec.kind === "log" ? Math.log10(value) : value);
    const annotations = [
      ...view.lines.filter((l) => l[1]).map(([at, text]) => ({
        ...note, xref: "paper", x: 1, xanchor: "right", y: logged(view.y, at), yanchor: "bottom", text: escape(text),
      })),
      ...view.uprights.filter((l) => l[1]).map(([at, text]) => ({
        ...note, yref: "paper", y: 1, yanchor: "top", x: logged(view.x, at), xanchor: "left", text: escape(text),
      })),
    ];
    const bars = view.series.filter((s) => s.kind === "bars");
    const categories = view.horizontal ? new Set(view.series.flatMap((s) => s.x)).size : 0;
    const x = axis(view, view.horizontal ? view.y : view.x, width, false);
    const y = axis(view, view.horizontal ? view.x : view.y, width, true);
    if (bars.length) (view.horizontal ? x : y).rangemode = "tozero";
    return {
      xaxis: x, yaxis: y, shapes, annotations, barmode: view.stacked ? "relative" : "group", bargap: 0.25,
      height: view.horizontal ? 110 + categories * Math.max(26, 15 * bars.length + 8) : width < 500 ? 330 : 360,
      margin: { l: 12, r: 12, t: 12, b: 12 }, autosize: true, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: ink, family: getComputedStyle(document.body).fontFamily, size: 12 },
      hoverlabel: { bgcolor: colour("--card"), bordercolor: faint, font: { color: ink, size: 12 }, align: "left" },
      hovermode: "closest", dragmode: coarse.matches ? false : "zoom", showlegend: false,
    };
  }

  const CONFIG = { displayModeBar: false, responsive: true, displaylogo: false, showTips: false, doubleClick: "reset", plotlyServerURL: "" };

  class Plot {
    constructor(figure) {
      this.figure = figure;
      this.element = document.getElementById(figure.key);
      this.plot = this.element.querySelector(".plot");
      this.status = this.element.querySelector(".status");
      this.select = this.element.querySelector("select");
      this.hidden = new Set();
      this.at = null;
      this.drawn = false;
      if (this.select) this.select.addEventListener("change", () => this.show());
      this.plot.addEventListener("keydown", (event) => this.key(event));
      this.plot.addEventListener("blur", () => this.leave());
      for (const button of this.element.querySelectorAll("[data-save]")) {
        button.addEventListener("click", () => this.save(button.dataset.save));
      }
    }

    get number() { return this.select ? this.select.selectedIndex : 0; }
    get view() { return this.figure.views[this.number]; }

    show() {
      const views = this.element.querySelectorAll("[data-view]");
      for (const one of views) one.hidden = Number(one.dataset.view) !== this.number;
      this.element.querySelector(".sentence").textContent = this.view.sentence;
      this.legend();
      this.at = null;
      if (this.drawn) this.draw();
    }

    legend() {
      const box = this.element.querySelector(".legend");
      box.replaceChildren();
      if (this.view.series.length < 2) return;
      this.view.series.forEach((s, i) => {
        const label = document.createElement("label");
        const tick = document.createElement("input");
        tick.type = "checkbox";
        tick.checked = !this.hidden.has(s.name);
        tick.addEventListener("change", () => {
          this.hidden[tick.checked ? "delete" : "add"](s.name);
          this.draw();
        });
        label.append(tick, swatch(s, i), s.name);
        box.append(label);
      });
    }

    draw() {
      this.drawn = true;
      this.plot.style.minHeight = "0";
      const width = this.plot.clientWidth;
      this.narrow = width < 500;
      Plotly.react(this.plot, traces(this.view, this.hidden, width), layout(this.view, width), CONFIG);
      if (!this.listens) {
        this.listens = true;
        this.plot.on("plotly_hover", (event) => {
          const p = event.points[0];
          this.status.textContent = this.view.series[p.curveNumber].labels[p.pointNumber] || "";
        });
        this.plot.on("plotly_unhover", () => { this.status.textContent = ""; });
      }
    }

    /** Arrow keys walk the points: left and right along a series, up and down between them. */
    key(event) {
      if (event.key === "Escape") return this.leave();
      const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
      if (!step || !this.drawn) return;
      event.preventDefault();
      const shown = this.view.series.map((s, i) => ({ s, i })).filter(({ s }) => !this.hidden.has(s.name) && s.y.some((y) => y !== null));
      if (!shown.length) return;
      let [series, point] = this.at || [0, -1];
      series = this.at ? (series + step[0] + shown.length) % shown.length : 0;
      const { s, i } = shown[series];
      point = this.at ? (point + step[1] + s.y.length) % s.y.length : 0;
      for (let tried = 0; s.y[point] === null && tried < s.y.length; tried++) {
        point = (point + (step[1] || 1) + s.y.length) % s.y.length;
      }
      this.at = [series, Math.min(point, s.y.length - 1)];
      Plotly.Fx.hover(this.plot, [{ curveNumber: i, pointNumber: this.at[1] }]);
      this.status.textContent = s.labels[this.at[1]] || "";
    }

    leave() {
      if (!this.at) return;
      this.at = null;
      this.status.textContent = "";
      Plotly.Fx.unhover(this.plot);
    }

    save(format) {
      const name = this.figure.key + (this.view.name ? "-" + this.view.name.replace(/[^\w.]+/g, "-") : "");
      if (format !== "csv") {
        const size = { width: 900, height: this.plot.clientHeight || 420 };
        Plotly.downloadImage(this.plot, { format, filename: name, scale: format === "png" ? 2 : 1, ...size });
        return;
      }
      const quoted = (cell) => `"${String(cell).replace(/"/g, '""')}"`;
      const table = this.element.querySelector(`[data-view="${this.number}"] table`);
      const lines = [...table.rows].map((row) => [...row.cells].map((cell) => quoted(cell.textContent)).join(","));
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([lines.join("\r\n")], { type: "text/csv" }));
      link.download = name + ".csv";
      link.click();
      URL.revokeObjectURL(link.href);
    }
  }

  /** The mark of a series beside its name, in the colour and form that it is drawn with. */
  function swatch(s, i) {
    const ns = "http://www.w3.org/2000/svg";
    const svg = document.createElementNS(ns, "svg");
    svg.setAttribute("width", "22");
    svg.setAttribute("height", "20");
    svg.setAttribute("aria-hidden", "true");
    const add = (name, attributes) => {
      const one = document.createElementNS(ns, name);
      for (const [key, value] of Object.entries(attributes)) one.setAttribute(key, value);
      svg.append(one);
    };
    const paint = `var(--c${s.colour % 8})`;
    if (s.kind === "bars") {
      add("rect", { x: 4, y: 4, width: 14, height: 12, style: `fill:${paint}` });
    } else {
      if (s.kind !== "points") {
        add("line", { x1: 0, x2: 22, y1: 10, y2: 10, style: `stroke:${paint};stroke-width:2` + (s.dashed ? ";stroke-dasharray:5 3" : "") });
      }
      if (s.kind !== "steps") {
        const form = SYMBOLS[i % SYMBOLS.length];
        add("path", { d: PATHS[form], style: `fill:${paint};stroke:${paint};stroke-width:1.6` });
      }
    }
    return svg;
  }

  const plots = figures.map((figure) => new Plot(figure));
  for (const plot of plots) plot.show();
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (!entry.isIntersecting) continue;
      seen.unobserve(entry.target);
      plots.find((p) => p.plot === entry.target).draw();
    }
  }, { rootMargin: "600px" });
  for (const plot of plots) seen.observe(plot.plot);
  const again = () => plots.filter((p) => p.drawn).forEach((p) => p.draw());
  dark.addEventListener("change", again);
  narrow.addEventListener("change", again);
  addEventListener("beforeprint", () => plots.forEach((p) => p.draw()));

  const theme = document.getElementById("theme");
  const name = () => root.dataset.theme || (dark.matches ? "dark" : "light");
  const say = () => { theme.textContent = name() === "dark" ? "Light colours" : "Dark colours"; };
  theme.hidden = false;
  theme.addEventListener("click", () => { root.dataset.theme = name() === "dark" ? "light" : "dark"; say(); again(); });
  dark.addEventListener("change", say);
  say();
})();
