// @ts-check
// All rows of an explorer as points over two risks, with tooltips, click, brush and keys. One module without libraries,
// used in notebooks (anywidget calls `render`) and in reports without a kernel (`upgrade` reads the data in the page).

/**
 * @typedef {{name: string, short: string, label: string, unit: string, colour: string,
 *   scale: "linear" | "log" | "symlog", width: number}} Metric
 *   colour: of a risk, "" for other metrics; width: half the linear part of a symmetric-logarithmic axis
 * @typedef {{data: string, metrics: Metric[], classes: string[], unit: string, palette: string[], right: string, wrong: string,
 *   totalOnDark: string, total: string}} Spec
 * @typedef {{get: (name: string) => any, set: (name: string, value: any) => void, send: (message: object) => void,
 *   on: (callback: () => void) => () => void}} Source
 *   the state of the plot, and where its messages go
 */

const CSS = `
.wb-linked{box-sizing:border-box;width:100%;min-width:0;position:relative;font:12px/1.4 var(--jp-ui-font-family,system-ui,sans-serif);
color:var(--jp-ui-font-color1,CanvasText);
--wb-soft:var(--jp-ui-font-color2,color-mix(in srgb,currentColor 72%,transparent));--wb-ground:var(--jp-layout-color1,var(--page,Canvas));
--wb-line:var(--jp-border-color2,color-mix(in srgb,currentColor 25%,transparent))}
.wb-linked *{box-sizing:border-box}
.wb-linked-bar{display:flex;flex-wrap:wrap;gap:4px 12px;align-items:center;margin-bottom:4px}
.wb-linked-bar label{display:inline-flex;gap:5px;align-items:center;min-width:0;color:var(--wb-soft)}
.wb-linked-bar select,.wb-linked-bar button{font:inherit;color:var(--jp-ui-font-color1,CanvasText);background:var(--wb-ground);
border:1px solid var(--wb-line);border-radius:3px;padding:2px 6px;max-width:190px;height:26px}
.wb-linked-bar button:disabled{opacity:.45}
.wb-linked-plot{position:relative;width:100%;height:360px;outline:none;cursor:crosshair;touch-action:pan-y;user-select:none;
border-radius:3px;background:var(--wb-ground)}
.wb-linked-plot:focus-visible,.wb-linked-bar :focus-visible{outline:2px solid var(--jp-brand-color1,Highlight);outline-offset:-2px}
.wb-linked-plot canvas{position:absolute;inset:0;width:100%;height:100%}
.wb-linked-tip{position:absolute;pointer-events:none;z-index:3;max-width:min(260px,90%);padding:5px 8px;border-radius:4px;font-size:11px;
background:var(--wb-ground);color:inherit;border:1px solid var(--wb-line);box-shadow:0 1px 5px rgba(0,0,0,.35)}
.wb-linked [hidden]{display:none}
.wb-linked-tip b{font-weight:600}
.wb-linked-tip .wb-linked-bad{color:var(--jp-error-color1,#d32f2f)}
.wb-linked-foot{display:flex;flex-wrap:wrap;gap:2px 14px;margin-top:3px;color:var(--wb-soft);font-size:11px}
.wb-linked-legend span{margin-right:9px;white-space:nowrap}
.wb-linked-said{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
@media (max-width:480px){.wb-linked-plot{height:300px}.wb-linked-bar{gap:4px 8px}.wb-linked-bar select{max-width:150px}}
@media (prefers-color-scheme:dark){.wb-linked-tip .wb-linked-bad{color:var(--jp-error-color1,#ff8a80)}}
`;
const SHAPES = ["●", "■", "▲", "◆", "✕"]; // in the legend; `mark` draws the same shapes
const MAX_LEGEND = 12; // maximum number of classes in the legend
const REACH = 14; // distance in pixels within which the pointer is on a point
const HELP =
  "Arrow keys move through the rows in ranked order, Home and End go to the first and last, Enter chooses a row, " +
  "Space adds it to the selection or removes it, Escape clears the selection. Drag to select rows.";

/** @param {string} tag @param {Record<string, string>} attributes @param {(Node | string)[]} children */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Numbers of a buffer, at any byte offset. @param {DataView} view @param {any} Type */
function numbersOf(view, Type) {
  return new Type(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}

/** Format a number with a few digits. @param {number} value */
function digits(value) {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "not a number" : value > 0 ? "infinite" : "−infinite";
  return String(Number(value.toPrecision(3))).replace("-", "−");
}

/** The transform of an axis and its inverse. @param {Metric} metric */
function transform(metric) {
  if (metric.scale === "log") return [Math.log10, (/** @type {number} */ v) => 10 ** v];
  if (metric.scale === "symlog") {
    return [(/** @type {number} */ v) => Math.asinh(v / metric.width), (/** @type {number} */ v) => metric.width * Math.sinh(v)];
  }
  const same = (/** @type {number} */ v) => v;
  return [same, same];
}

/** Round tick values within the limits of an axis. @param {Metric} metric @param {number} low @param {number} high @param {number} most */
function ticks(metric, low, high, most) {
  /** @type {number[]} */
  const found = [];
  if (metric.scale === "linear") {
    const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough));
    const step = power * ([1, 2, 5].find(k => k * power >= rough) ?? 10);
    for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(Number((k * step).toPrecision(12)));
    return found;
  }
  const reach = Math.max(Math.abs(low), Math.abs(high)), least = metric.scale === "log" ? low : metric.width / 2;
  const first = Math.floor(Math.log10(least)), last = Math.ceil(Math.log10(reach));
  const every = Math.max(1, Math.ceil((last - first) * (metric.scale === "log" ? 0.6 : 2) / most));
  const factors = last - first <= 2 && metric.scale === "log" ? [1, 2, 5] : [1];
  for (let k = first; k <= last; k += every) {
    for (const factor of factors) found.push(factor * 10 ** k);
  }
  if (metric.scale === "symlog") found.push(0, ...found.map(v => -v));
  return found.filter(v => v >= low && v <= high);
}

const around = (/** @type {number} */ turns) => [Math.cos(2 * Math.PI * turns), Math.sin(2 * Math.PI * turns)];
const OUTLINES = [ // of the shapes, about as large as a disc of radius 1; none for the disc
  [], [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]], [[0, -1.2], [1.1, 0.8], [-1.1, 0.8]], [[0, -1.3], [1.3, 0], [0, 1.3], [-1.3, 0]],
  [0, 1, 2, 3].flatMap(k => [-0.04, 0.04, 0.125].map((turn, j) => around(k / 4 + 1 / 8 + turn).map(v => v * (j < 2 ? 1.6 : 0.5)))),
];

/**
 * Add the outline of a point to a path.
 * @param {CanvasRenderingContext2D} to
 * @param {number} shape
 * @param {number} x
 * @param {number} y
 * @param {number} r
 */
function mark(to, shape, x, y, r) {
  if (!OUTLINES[shape].length) return to.arc(x, y, r, 0, 7);
  for (const [across, down] of OUTLINES[shape]) to.lineTo(x + across * r, y + down * r);
  to.closePath();
}

/**
 * Show the plot in an element.
 * @param {HTMLElement} el
 * @param {Source} source
 * @returns {() => void} takes it away again
 */
export function mount(el, source) {
  /** @type {Spec} */
  const spec = source.get("spec");
  const rows = numbersOf(source.get("rows"), Int32Array), n = rows.length;
  const values = numbersOf(source.get("numbers"), Float32Array);
  const predicted = numbersOf(source.get("predicted"), Float32Array), target = numbersOf(source.get("target"), Float32Array);
  const place = new Map(Array.from(rows, (row, i) => [row, i]));
  const column = (/** @type {string} */ name) => {
    const k = Math.max(spec.metrics.findIndex(metric => metric.name === name), 0);
    return { metric: spec.metrics[k], values: values.subarray(k * n, (k + 1) * n) };
  };
  const isWrong = (/** @type {number} */ i) => spec.classes.length > 0 && predicted[i] !== target[i];

  // ---- elements
  const choose = (/** @type {string} */ label, /** @type {string} */ trait, /** @type {string[][]} */ options) => {
    const select = /** @type {HTMLSelectElement} */ (make("select", { "aria-label": label }));
    select.append(...options.map(([value, text]) => make("option", { value }, text)));
    select.addEventListener("change", () => source.set(trait, select.value));
    return { trait, select, whole: make("label", {}, label, select) };
  };
  const metrics = spec.metrics.map(metric => [metric.name, metric.short]);
  const pickers = [choose("across", "x", metrics), choose("up", "y", metrics)];
  if (spec.classes.length) pickers.push(choose("colour", "colour", [["wrong", "right or wrong"], ["class", "true class"]]));
  const clear = /** @type {HTMLButtonElement} */ (make("button", { type: "button", title: "Deselect all rows" }, "Clear selection"));
  const points = document.createElement("canvas"), marks = document.createElement("canvas");
  const tip = make("div", { class: "wb-linked-tip", hidden: "" });
  const plot = make("div", { class: "wb-linked-plot", tabindex: "0", role: "application", "aria-roledescription": "scatter plot" });
  plot.append(points, marks, tip);
  const legend = make("div", { class: "wb-linked-legend" }), status = make("div", { class: "wb-linked-status" });
  const said = make("div", { class: "wb-linked-said", "aria-live": "polite", role: "status" });
  const root = make(
    "div", { class: "wb-linked", "data-lm-suppress-shortcuts": "true" }, // keeps JupyterLab's shortcuts from taking its keys
    make("style", {}, CSS), make("div", { class: "wb-linked-bar" }, ...pickers.map(p => p.whole), clear), plot,
    make("div", { class: "wb-linked-foot" }, legend, status), said,
  );
  el.replaceChildren(root);

  // ---- what is drawn
  const px = new Float32Array(n), py = new Float32Array(n); // positions of the points; NaN for points that are not drawn
  let width = 0, height = 0, box = { left: 0, top: 0, right: 0, bottom: 0 };
  /** @type {{low: number, high: number, from: (v: number) => number, to: (v: number) => number, metric: Metric}[]} */
  let axes = [];
  let hovered = -1, cursor = -1;
  /** @type {{x: number, y: number, toX: number, toY: number, moved: boolean} | null} */
  let drag = null;

  const passes = () => numbersOf(source.get("passing"), Uint8Array);
  const chosenOnes = () => numbersOf(source.get("selected"), Uint8Array);
  const ink = () => getComputedStyle(root).color;
  const ground = () => getComputedStyle(plot).backgroundColor;
  const dark = () => {
    const [r, g, b] = (ink().match(/[\d.]+/g) ?? ["0", "0", "0"]).map(Number);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 127;
  };
  const shade = (/** @type {string} */ colour) => (colour === spec.total && dark() ? spec.totalOnDark : colour);

  /** Colour and shape of each group of points, its name, and the group of each point. */
  function groups() {
    const by = source.get("colour");
    if (!spec.classes.length) {
      const colour = shade(column(source.get("x")).metric.colour || spec.total);
      return { known: [{ colour, shape: 0, name: "" }], of: () => 0 };
    }
    if (by === "class") {
      const known = spec.classes.map((name, i) => (
        { name, colour: spec.palette[i % spec.palette.length], shape: (i + Math.floor(i / spec.palette.length)) % SHAPES.length }));
      return { known, of: (/** @type {number} */ i) => target[i] };
    }
    const known = [{ name: "right", colour: spec.right, shape: 0 }, { name: "wrong", colour: spec.wrong, shape: 4 }];
    return { known, of: (/** @type {number} */ i) => Number(isWrong(i)) };
  }

  /** Limits of an axis: the range of its finite values, with a margin. @param {string} name */
  function axisOf(name) {
    const { metric, values: v } = column(name), [to, from] = transform(metric);
    let low = Infinity, high = -Infinity;
    for (const value of v) {
      if (Number.isFinite(value)) { low = Math.min(low, value); high = Math.max(high, value); }
    }
    if (!(low <= high)) [low, high] = [metric.scale === "log" ? 0.1 : 0, 1];
    let [a, b] = [to(low), to(high)];
    const room = b > a ? 0.04 * (b - a) : Math.max(0.05 * Math.abs(a), 1e-6);
    [a, b] = [a - room, b + room];
    return { metric, to, from, low: a, high: b };
  }

  function layOut() {
    axes = [axisOf(source.get("x")), axisOf(source.get("y"))];
    box = { left: width < 420 ? 48 : 58, top: 8, right: width - 10, bottom: height - 38 };
    const [across, up] = axes, vx = column(source.get("x")).values, vy = column(source.get("y")).values;
    for (let i = 0; i < n; i++) {
      const fine = Number.isFinite(vx[i]) && Number.isFinite(vy[i]);
      px[i] = fine ? box.left + ((across.to(vx[i]) - across.low) / (across.high - across.low)) * (box.right - box.left) : NaN;
      py[i] = fine ? box.bottom - ((up.to(vy[i]) - up.low) / (up.high - up.low)) * (box.bottom - box.top) : NaN;
    }
  }

  /** @param {HTMLCanvasElement} canvas */
  function blank(canvas) {
    const ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const to = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    to.scale(ratio, ratio);
    return to;
  }

  /** @param {CanvasRenderingContext2D} to */
  function drawAxes(to) {
    const family = getComputedStyle(root).fontFamily, colour = ink();
    to.fillStyle = to.strokeStyle = colour;
    to.lineWidth = 0.6;
    const line = (/** @type {number[]} */ [x0, y0, x1, y1], /** @type {number} */ alpha) => {
      to.globalAlpha = alpha;
      to.beginPath(); to.moveTo(x0, y0); to.lineTo(x1, y1); to.stroke();
      to.globalAlpha = 1;
    };
    axes.forEach((axis, k) => {
      const [first, last] = k ? [box.bottom, box.top] : [box.left, box.right];
      let free = -Infinity; // end of the previous label
      to.font = `11px ${family}`;
      for (const value of ticks(axis.metric, axis.from(axis.low), axis.from(axis.high), k ? 6 : Math.max(3, width / 90)).sort((a, b) => a - b)) {
        const at = first + ((axis.to(value) - axis.low) / (axis.high - axis.low)) * (last - first), text = digits(value);
        line(k ? [box.left, at, box.right, at] : [at, box.top, at, box.bottom], 0.2);
        const half = k ? 7 : to.measureText(text).width / 2 + 4, along = k ? -at : at;
        if (along - half < free) continue;
        free = along + half;
        to.textAlign = k ? "right" : "center";
        to.textBaseline = k ? "middle" : "top";
        to.fillText(text, k ? box.left - 6 : Math.min(at, width - half + 3), k ? at : box.bottom + 5);
      }
    });
    line([box.left, box.bottom, box.right, box.bottom], 0.8);
    line([box.left, box.top, box.left, box.bottom], 0.8);
    to.font = `12px ${family}`;
    to.textAlign = "center";
    to.textBaseline = "alphabetic";
    to.fillText(axes[0].metric.label, (box.left + box.right) / 2, height - 5, box.right - box.left);
    to.save();
    to.translate(14, (box.top + box.bottom) / 2);
    to.rotate(-Math.PI / 2);
    to.fillText(axes[1].metric.label, 0, 0, box.bottom - box.top);
    to.restore();
  }

  function drawPoints() {
    const to = blank(points), { known, of } = groups(), pass = passes(), selected = chosenOnes();
    const some = selected.includes(1), r = n > 5000 ? 1.8 : n > 1000 ? 2.4 : n > 200 ? 3.2 : 4.2;
    const usual = n > 5000 ? 0.4 : n > 1000 ? 0.55 : 0.75;
    drawAxes(to);
    // layers: hidden by the filter, not selected, the rest; points of a colour are one path unless they are transparent
    const layers = [0.07, some ? 0.22 : usual, some ? 0.9 : usual];
    const layerOf = (/** @type {number} */ i) => (!pass[i] ? 0 : some && !selected[i] ? 1 : 2);
    const stamps = known.map(group => stamp(group, r));
    layers.forEach((alpha, layer) => {
      to.globalAlpha = alpha;
      for (let i = 0; i < n; i++) {
        if (layerOf(i) !== layer || Number.isNaN(px[i])) continue;
        const drawn = stamps[of(i)];
        to.drawImage(drawn, px[i] - drawn.width / 4, py[i] - drawn.height / 4, drawn.width / 2, drawn.height / 2);
      }
    });
    to.globalAlpha = 1;
  }

  /** The image of one point, drawn once at twice its size. @param {{colour: string, shape: number}} group @param {number} r */
  function stamp(group, r) {
    const canvas = document.createElement("canvas");
    canvas.width = canvas.height = Math.ceil(4 * (1.4 * r + 1));
    const to = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    to.scale(2, 2);
    to.fillStyle = group.colour;
    to.beginPath();
    mark(to, group.shape, canvas.width / 4, canvas.height / 4, r);
    to.fill();
    return canvas;
  }

  function drawMarks() {
    const to = blank(marks), colour = ink();
    const ring = (/** @type {number} */ i, /** @type {number} */ r, /** @type {number} */ thick) => {
      if (i < 0 || Number.isNaN(px[i])) return;
      for (const [stroke, wide] of [[ground(), thick + 2.5], [colour, thick]]) {
        to.strokeStyle = /** @type {string} */ (stroke);
        to.lineWidth = /** @type {number} */ (wide);
        to.beginPath(); to.arc(px[i], py[i], r, 0, 7); to.stroke();
      }
    };
    ring(place.get(source.get("row")) ?? -1, 8, 2.6);
    ring(hovered, 6, 1.3);
    if (drag?.moved) {
      const [x0, y0, x1, y1] = rectangle(drag);
      to.strokeStyle = to.fillStyle = colour;
      to.globalAlpha = 0.1;
      to.fillRect(x0, y0, x1 - x0, y1 - y0);
      to.globalAlpha = 0.9;
      to.setLineDash([4, 3]);
      to.strokeRect(x0, y0, x1 - x0, y1 - y0);
    }
  }

  /** The part of a drag inside the plot, in pixels. @param {{x: number, y: number, toX: number, toY: number}} dragged */
  function rectangle({ x, y, toX, toY }) {
    const inside = (/** @type {number} */ v, /** @type {number} */ a, /** @type {number} */ b) => Math.min(Math.max(v, a), b);
    const xs = [x, toX].map(v => inside(v, box.left, box.right)).sort((a, b) => a - b);
    const ys = [y, toY].map(v => inside(v, box.top, box.bottom)).sort((a, b) => a - b);
    return [xs[0], ys[0], xs[1], ys[1]];
  }

  /** The same in the units of the axes. @param {number[]} pixels */
  function ranges([x0, y0, x1, y1]) {
    const [across, up] = axes;
    const atX = (/** @type {number} */ x) => across.from(across.low + ((x - box.left) / (box.right - box.left)) * (across.high - across.low));
    const atY = (/** @type {number} */ y) => up.from(up.low + ((box.bottom - y) / (box.bottom - box.top)) * (up.high - up.low));
    return { x: [atX(x0), atX(x1)], y: [atY(y1), atY(y0)] };
  }

  // ---- texts
  /** @param {number} i @returns {[string, string, boolean][]} lines: text, colour of the square before it, whether it is a warning */
  function linesOf(i) {
    /** @type {[string, string, boolean][]} */
    const lines = [[`row ${rows[i]}`, "", false]];
    if (spec.classes.length) {
      lines.push([`${spec.classes[predicted[i]]}, true ${spec.classes[target[i]]}${isWrong(i) ? " (wrong)" : ""}`, "", isWrong(i)]);
    } else if (predicted.length) lines.push([`${digits(predicted[i])}, true ${digits(target[i])} ${spec.unit}`.trim(), "", false]);
    const shown = [source.get("x"), source.get("y")];
    spec.metrics.forEach((metric, k) => {
      if (metric.name.includes(" of ") && !shown.includes(metric.name)) return; // of a single one of several targets
      lines.push([`${metric.short} ${digits(values[k * n + i])} ${metric.unit}`.trim(), shade(metric.colour), false]);
    });
    return lines;
  }

  /** @param {number} i */
  function showTip(i) {
    hovered = i;
    tip.hidden = i < 0 || Number.isNaN(px[i]);
    if (tip.hidden) return drawMarks();
    tip.replaceChildren(...linesOf(i).map(([text, colour, bad], k) => {
      const line = make("div", bad ? { class: "wb-linked-bad" } : {}, k ? text : make("b", {}, text));
      if (colour) line.prepend(make("span", { style: `color:${colour}` }, "■ "));
      return line;
    }));
    const wide = tip.offsetWidth, high = tip.offsetHeight;
    tip.style.left = `${Math.max(0, px[i] + 14 + wide < width ? px[i] + 14 : px[i] - 14 - wide)}px`;
    tip.style.top = `${Math.max(0, Math.min(py[i] - high / 2, height - high))}px`;
    drawMarks();
  }

  function tell() {
    const pass = passes(), selected = chosenOnes(), count = (/** @type {(i: number) => boolean} */ test) => {
      let total = 0;
      for (let i = 0; i < n; i++) if (test(i)) total++;
      return total;
    };
    const undrawn = count(i => Number.isNaN(px[i])), hidden = count(i => !pass[i]), picked = count(i => Boolean(selected[i]));
    const number = (/** @type {number} */ v) => v.toLocaleString("en");
    const { known } = groups(), many = known.length > MAX_LEGEND ? [`and ${known.length - MAX_LEGEND} more`] : [];
    legend.replaceChildren(...known.slice(0, MAX_LEGEND).filter(group => group.name).map(group => (
      make("span", {}, make("span", { style: `color:${group.colour};margin:0` }, `${SHAPES[group.shape]} `), group.name))), ...many);
    legend.hidden = !legend.childNodes.length;
    status.textContent = [
      `${number(n)} ${n === 1 ? "row" : "rows"}`, hidden && `${number(hidden)} hidden by the filter`, picked && `${number(picked)} selected`,
      undrawn && `${number(undrawn)} not drawn: NaN or infinite`, !place.has(source.get("row")) && `row ${source.get("row")} is not in this plot`,
    ].filter(Boolean).join(" · ");
    plot.setAttribute("aria-label", `${spec.data}: ${axes[1].metric.label} over ${axes[0].metric.label}. ${status.textContent}. ${HELP}`);
    clear.disabled = !picked;
    for (const picker of pickers) picker.select.value = source.get(picker.trait);
  }

  // ---- redrawing
  let waiting = 0;
  function redraw() {
    waiting = 0;
    width = plot.clientWidth; height = plot.clientHeight;
    if (!width || !height) return; // in a closed tab
    layOut();
    drawPoints();
    tell();
    drawMarks();
  }
  function refresh() {
    waiting ||= requestAnimationFrame(redraw);
  }

  // ---- pointer and keys
  /** @param {number} x @param {number} y */
  function nearest(x, y) {
    const pass = passes();
    let found = -1, least = REACH * REACH;
    for (let i = 0; i < n; i++) {
      const distance = (px[i] - x) ** 2 + (py[i] - y) ** 2; // comparisons with NaN are false
      if (distance < least && pass[i]) { least = distance; found = i; }
    }
    return found;
  }
  /** @param {PointerEvent} event */
  function at(event) {
    const edge = plot.getBoundingClientRect();
    return { x: event.clientX - edge.left, y: event.clientY - edge.top };
  }
  plot.addEventListener("pointerdown", event => {
    if (event.button) return;
    const { x, y } = at(event);
    drag = { x, y, toX: x, toY: y, moved: false };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", event => {
    const { x, y } = at(event);
    if (!drag) return showTip(nearest(x, y));
    Object.assign(drag, { toX: x, toY: y, moved: drag.moved || Math.hypot(x - drag.x, y - drag.y) > 5 });
    if (drag.moved) { tip.hidden = true; hovered = -1; drawMarks(); }
  });
  plot.addEventListener("pointerup", event => {
    const done = drag, more = event.shiftKey || event.ctrlKey || event.metaKey;
    drag = null;
    if (!done) return;
    if (done.moved) {
      const { x, y } = ranges(rectangle(done));
      source.send({ kind: "brush", across: source.get("x"), up: source.get("y"), x, y, add: more });
    } else {
      const i = nearest(done.x, done.y);
      cursor = i;
      if (i >= 0) source.send({ kind: more ? "toggle" : "choose", row: rows[i] });
      else if (!more && !clear.disabled) source.send({ kind: "clear" });
    }
    drawMarks();
  });
  plot.addEventListener("pointercancel", () => { drag = null; drawMarks(); });
  plot.addEventListener("pointerleave", () => { if (!drag) showTip(-1); });
  plot.addEventListener("blur", () => showTip(-1));
  plot.addEventListener("keydown", event => {
    const order = numbersOf(source.get("order"), Int32Array);
    if (event.altKey || event.ctrlKey || event.metaKey || !order.length) return;
    const chosen = place.get(source.get("row")) ?? -1;
    const now = order.indexOf(cursor >= 0 ? cursor : chosen), last = order.length - 1;
    /** @type {Record<string, number>} */
    const moves = {
      ArrowDown: now + 1, ArrowRight: now + 1, ArrowUp: now - 1, ArrowLeft: now - 1,
      PageDown: now + 10, PageUp: now - 10, Home: 0, End: last,
    };
    if (event.key in moves) {
      cursor = order[Math.min(Math.max(moves[event.key], 0), last)];
      showTip(cursor);
      said.textContent = `${order.indexOf(cursor) + 1} of ${order.length}: ${linesOf(cursor).map(line => line[0]).join(", ")}`;
    } else if (event.key === "Enter" && cursor >= 0) source.send({ kind: "choose", row: rows[cursor] });
    else if (event.key === " " && cursor >= 0) source.send({ kind: "toggle", row: rows[cursor] });
    else if (event.key === "Escape") source.send({ kind: "clear" });
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  clear.addEventListener("click", () => source.send({ kind: "clear" }));

  // ---- changes from outside
  let before = "";
  const forget = source.on(() => {
    const picked = chosenOnes().reduce((/** @type {number} */ sum, /** @type {number} */ v) => sum + v, 0);
    const now = `${picked} ${picked === 1 ? "row" : "rows"} selected`;
    if (now !== before) said.textContent = before = now;
    refresh();
  });
  const sized = new ResizeObserver(refresh);
  sized.observe(plot);
  const themed = new MutationObserver(() => [0, 150, 600].forEach(wait => setTimeout(refresh, wait))); // styles of a new theme arrive later
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  const scheme = window.matchMedia("(prefers-color-scheme: dark)");
  scheme.addEventListener("change", refresh);
  const paper = window.matchMedia("print"); // print is white, and does not wait for an animation frame
  paper.addEventListener("change", redraw);
  refresh();
  return () => {
    forget();
    sized.disconnect();
    themed.disconnect();
    scheme.removeEventListener("change", refresh);
    paper.removeEventListener("change", redraw);
    cancelAnimationFrame(waiting);
  };
}

/** The state in a page without a kernel: choosing and brushing change only the plot. @param {Record<string, any>} held @returns {Source} */
function stillSource(held) {
  /** @type {Record<string, any>} */
  const state = { ...held };
  for (const name of ["rows", "numbers", "predicted", "target", "passing", "selected", "order"]) {
    state[name] = new DataView(Uint8Array.from(atob(held[name]), letter => letter.charCodeAt(0)).buffer);
  }
  const rows = numbersOf(state.rows, Int32Array), values = numbersOf(state.numbers, Float32Array), n = rows.length;
  /** @type {Set<() => void>} */
  const heard = new Set();
  const changed = () => heard.forEach(hear => hear());
  /** @param {any} message */
  function send(message) {
    const selected = numbersOf(state.selected, Uint8Array), pass = numbersOf(state.passing, Uint8Array);
    const of = (/** @type {string} */ name) => held.spec.metrics.findIndex((/** @type {Metric} */ metric) => metric.name === name) * n;
    const within = (/** @type {number} */ v, /** @type {number[]} */ [low, high]) => v >= low && v <= high;
    if (message.kind === "choose") state.row = message.row;
    else if (message.kind === "toggle") { const i = rows.indexOf(message.row); selected[i] = 1 - selected[i]; }
    else if (message.kind === "clear") selected.fill(0);
    else if (message.kind === "brush") {
      for (let i = 0; i < n; i++) {
        const inside = within(values[of(message.across) + i], message.x) && within(values[of(message.up) + i], message.y) && pass[i];
        selected[i] = inside ? 1 : message.add ? selected[i] : 0;
      }
    }
    state.selected = new DataView(selected.buffer);
    changed();
  }
  return {
    get: name => state[name],
    set: (name, value) => { state[name] = value; changed(); },
    send,
    on: hear => { heard.add(hear); return () => heard.delete(hear); },
  };
}

/** Turn every element of a page that has the data of a plot into one. @param {ParentNode} page */
export function upgrade(page = document) {
  for (const element of page.querySelectorAll("[data-wb-linked]")) {
    const el = /** @type {HTMLElement} */ (element);
    try {
      mount(el, stillSource(JSON.parse(el.dataset.wbLinked ?? "")));
      el.removeAttribute("data-wb-linked");
    } catch (error) { // keep its static picture
      console.warn("workbench: the rows of a plot can't be read", error);
    }
  }
}

/** Entry point of anywidget. @param {{model: any, el: HTMLElement}} given */
function render({ model, el }) {
  return mount(el, {
    get: name => model.get(name),
    set: (name, value) => { model.set(name, value); model.save_changes(); },
    send: message => model.send(message),
    on: heard => { model.on("change", heard); return () => model.off("change", heard); },
  });
}

export default { render };
