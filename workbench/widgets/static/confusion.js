// @ts-check
// The confusion matrix of an explorer, whose cells and heads are buttons that filter rows. One module without libraries, for anywidget.

const CSS = `
.wb-confusion{font:12px/1.3 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,CanvasText);max-width:100%;overflow:auto;
--wb-soft:var(--jp-ui-font-color2,color-mix(in srgb,currentColor 72%,transparent))}
.wb-confusion table{border-collapse:separate;border-spacing:2px;margin:0;width:auto;table-layout:auto;border:0}
.wb-confusion caption{text-align:left;color:var(--wb-soft);padding:0 0 3px;font-size:11px}
.wb-confusion :is(tr,th,td){padding:0;border:0;background:none;text-align:center;font-weight:400}
.wb-confusion tbody th{text-align:right}
.wb-confusion button{box-sizing:border-box;font:inherit;color:inherit;border:0;border-radius:3px;min-width:28px;width:100%;height:24px;padding:0 4px;
background:none;cursor:pointer}
.wb-confusion th button{max-width:84px;overflow:hidden;text-overflow:ellipsis;white-space:nowrap;color:var(--wb-soft)}
.wb-confusion button:is(:hover,:focus-visible){outline:2px solid var(--jp-brand-color1,Highlight);outline-offset:-1px}
.wb-confusion button[aria-pressed=true]{box-shadow:inset 0 0 0 2px currentColor;font-weight:700;color:var(--jp-ui-font-color1,CanvasText)}
.wb-confusion button[aria-disabled=true]{color:var(--wb-soft);cursor:default}
`;

/** @param {string} tag @param {Record<string, string>} attributes @param {(Node | string)[]} children */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Entry point of anywidget. @param {{model: any, el: HTMLElement}} given */
function render({ model, el }) {
  /** @type {string[]} */
  const classes = model.get("classes");
  const n = classes.length;
  const root = make("div", { class: "wb-confusion", "data-lm-suppress-shortcuts": "true" }); // keeps JupyterLab's shortcuts from taking its keys
  el.replaceChildren(root);
  let at = [0, 0]; // position of the one button that Tab reaches; row 0 and column 0 are the headers
  /** @type {HTMLElement[][]} */
  let buttons = [];

  /** A button for a true class and a predicted class, each null for any. @param {number | null} truth @param {number | null} predicted
   * @param {number} count */
  function button(truth, predicted, count) {
    const [chosenTruth, chosenPredicted] = model.get("chosen");
    const names = [truth !== null && `true ${classes[truth]}`, predicted !== null && `predicted ${classes[predicted]}`].filter(Boolean).join(", ");
    const head = truth === null || predicted === null;
    const label = `${names}: ${count} ${count === 1 ? "row" : "rows"}`;
    const made = make("button", {
      type: "button", tabindex: "-1", title: label, "aria-label": label, "aria-disabled": String(!count),
      "aria-pressed": String(truth === chosenTruth && predicted === chosenPredicted),
    }, head ? classes[/** @type {number} */ (truth ?? predicted)] : count ? String(count) : "·");
    made.addEventListener("click", () => {
      if (!count) return;
      const same = made.getAttribute("aria-pressed") === "true";
      model.send(same ? { kind: "cell", truth: null, predicted: null } : { kind: "cell", truth, predicted });
    });
    return made;
  }

  function draw() {
    const focused = root.contains(document.activeElement);
    /** @type {number[][]} */
    const counts = model.get("counts");
    const sum = (/** @type {number[]} */ values) => values.reduce((a, b) => a + b, 0);
    const most = [true, false].map(right => Math.max(1, ...counts.flatMap((row, i) => row.filter((_, j) => (i === j) === right))));
    const heads = classes.map((_, j) => button(null, j, sum(counts.map(row => row[j]))));
    buttons = [heads, ...counts.map((row, i) => [button(i, null, sum(row)), ...row.map((count, j) => {
      const cell = button(i, j, count), right = i === j;
      const share = count ? 12 + 48 * Math.sqrt(count / most[right ? 0 : 1]) : 0;
      cell.style.background = `color-mix(in srgb, ${model.get(right ? "right" : "wrong")} ${share.toFixed()}%, transparent)`;
      return cell;
    })])];
    buttons[0].unshift(document.createElement("span")); // the corner
    const wrap = (/** @type {string} */ tag, /** @type {Record<string, string>} */ attributes, /** @type {Node} */ child) => make(tag, attributes, child);
    root.replaceChildren(make("style", {}, CSS), make("table", {},
      make("caption", {}, "Rows by true class (down) and predicted class (across). Click a cell or a class to list its rows."),
      make("thead", {}, make("tr", {}, make("td"), ...heads.filter(h => h.tagName === "BUTTON").map(h => wrap("th", { scope: "col" }, h)))),
      make("tbody", {}, ...buttons.slice(1).map(([head, ...cells]) => (
        make("tr", {}, wrap("th", { scope: "row" }, head), ...cells.map(cell => wrap("td", {}, cell)))))),
    ));
    if (!at[0] && !at[1]) at = [1, 1];
    buttons[at[0]][at[1]].tabIndex = 0;
    if (focused) buttons[at[0]][at[1]].focus();
  }

  root.addEventListener("focusin", event => {
    buttons.forEach((row, i) => row.forEach((cell, j) => {
      if (cell === event.target) at = [i, j];
      cell.tabIndex = cell === event.target ? 0 : -1;
    }));
  });
  root.addEventListener("keydown", event => {
    const [i, j] = at;
    /** @type {Record<string, number[]>} */
    const moves = { ArrowDown: [i + 1, j], ArrowUp: [i - 1, j], ArrowRight: [i, j + 1], ArrowLeft: [i, j - 1], Home: [i, 0], End: [i, n] };
    event.stopPropagation();
    if (event.key === "Escape") model.send({ kind: "cell", truth: null, predicted: null });
    if (!(event.key in moves) || event.altKey || event.ctrlKey || event.metaKey) return;
    const [down, across] = moves[event.key].map(v => Math.min(Math.max(v, 0), n));
    if (down || across) buttons[down][across].focus();
    event.preventDefault();
  });
  const changed = () => draw();
  const names = ["change:chosen", "change:counts"];
  names.forEach(name => model.on(name, changed));
  draw();
  return () => names.forEach(name => model.off(name, changed));
}

export default { render };
