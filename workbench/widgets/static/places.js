// @ts-check
// A picture whose panels all show the same places (pixels, positions): choose one by click or arrow keys. One module without libraries, for anywidget.

/** @typedef {[left: number, top: number, width: number, height: number]} Panel  as shares of the picture */

const CSS = `
.wb-places{max-width:100%;overflow-x:auto;font:12px/1.3 var(--jp-ui-font-family,system-ui,sans-serif);color:var(--jp-ui-font-color1,CanvasText)}
.wb-places-plot{position:relative;width:fit-content;max-width:100%;cursor:crosshair;outline:none;user-select:none;touch-action:manipulation}
.wb-places-plot:focus-visible{outline:2px solid var(--jp-brand-color1,Highlight);outline-offset:-2px}
.wb-places-plot :is(img,svg){display:block;width:100%;max-width:none;height:auto}
.wb-places-mark{position:absolute;box-sizing:border-box;transform:translate(-50%,-50%);min-width:9px;min-height:9px;pointer-events:none;
border:2px solid #fff;box-shadow:0 0 0 1.5px #000,inset 0 0 0 1px #000}
.wb-places-said{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
`;
const HELP =
  "Arrow keys move from place to place, with Shift ten at a time; Home goes to the place that carries most of the risk, Escape deselects it.";

/** @param {string} tag @param {Record<string, string>} attributes @param {(Node | string)[]} children */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Entry point of anywidget. @param {{model: any, el: HTMLElement}} given */
function render({ model, el }) {
  const holder = make("div"), marks = make("div");
  const plot = make("div", { class: "wb-places-plot", tabindex: "0", role: "application", "aria-roledescription": "picture of places" }, holder, marks);
  const said = make("div", { class: "wb-places-said", "aria-live": "polite", role: "status" });
  el.replaceChildren(make("div", { class: "wb-places", "data-lm-suppress-shortcuts": "true" }, make("style", {}, CSS), plot, said)); // keeps JupyterLab's shortcuts from taking its keys
  /** @type {number[]} row and column, or nothing */
  let at = [];
  let sent = 0; // number of the last message; the kernel acknowledges messages, and places from older ones are ignored

  function drawPicture() {
    holder.innerHTML = model.get("markup");
    const picture = /** @type {HTMLElement | null} */ (holder.querySelector("img,svg"));
    const shown = /** @type {HTMLElement | null} */ (holder.querySelector(".wb-figure"));
    if (shown) shown.style.display = "block";
    plot.style.minWidth = `${model.get("least")}px`;
    plot.setAttribute("aria-label", `${model.get("alt")}. ${HELP}`);
    picture?.setAttribute("draggable", "false");
    drawMarks();
  }

  function drawMarks() {
    const [rows, columns] = model.get("size");
    /** @type {Panel[]} */
    const panels = at.length ? model.get("panels") : [];
    marks.replaceChildren(...panels.map(([left, top, width, height]) => make("div", {
      class: "wb-places-mark",
      style: `left:${100 * (left + width * (at[1] + 0.5) / columns)}%;top:${100 * (top + height * (at[0] + 0.5) / rows)}%;` +
        `width:${100 * width / columns}%;height:${100 * height / rows}%`,
    })));
  }

  /** @param {object} message */
  function send(message) {
    sent += 1;
    model.send({ ...message, turn: sent });
  }

  /** @param {number} row @param {number} column */
  function go(row, column) {
    const [rows, columns] = model.get("size");
    at = [Math.min(Math.max(row, 0), rows - 1), Math.min(Math.max(column, 0), columns - 1)];
    drawMarks();
    send({ kind: "place", row: at[0], column: at[1] });
  }

  plot.addEventListener("click", event => {
    const edge = holder.getBoundingClientRect(), [rows, columns] = model.get("size");
    const x = (event.clientX - edge.left) / edge.width, y = (event.clientY - edge.top) / edge.height;
    for (const [left, top, width, height] of /** @type {Panel[]} */ (model.get("panels"))) {
      const across = (x - left) / width, down = (y - top) / height;
      if (across >= 0 && across < 1 && down >= 0 && down < 1) return go(Math.floor(down * rows), Math.floor(across * columns));
    }
  });
  plot.addEventListener("keydown", event => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    const step = event.shiftKey ? 10 : 1;
    /** @type {Record<string, number[]>} */
    const moves = { ArrowDown: [step, 0], ArrowUp: [-step, 0], ArrowRight: [0, step], ArrowLeft: [0, -step] };
    if (event.key in moves && at.length) go(at[0] + moves[event.key][0], at[1] + moves[event.key][1]);
    else if (event.key in moves || event.key === "Home") send({ kind: "riskiest" });
    else if (event.key === "Escape") {
      at = [];
      drawMarks();
      send({ kind: "none" });
    } else return;
    event.preventDefault();
    event.stopPropagation();
  });

  const hear = () => {
    if (model.get("turn") >= sent || !sent) at = model.get("place");
    said.textContent = model.get("said");
    drawMarks();
  };
  /** @type {[string, () => void][]} */
  const heard = [["markup", drawPicture], ["alt", drawPicture], ["panels", drawMarks], ["size", drawMarks], ["least", drawPicture],
    ["place", hear], ["said", hear], ["turn", hear]];
  heard.forEach(([name, act]) => model.on(`change:${name}`, act));
  hear();
  drawPicture();
  return () => heard.forEach(([name, act]) => model.off(`change:${name}`, act));
}

export default { render };
