// @ts-check
// A text whose tokens are coloured by a risk, with the alternatives of each by pointer, touch and keys. One module without libraries,
// used in notebooks (anywidget calls `render`) and in reports without a kernel (`upgrade` reads the data in the page).

/**
 * @typedef {[word: string, probability: number | null, members: (number | null)[]]} Choice
 * @typedef {{word: string, risks: (number | null)[], choices: Choice[], written: number}} Token
 *   risks: one of each kind, null where it is not a finite number; written: which choice the token is
 * @typedef {{members: number, kinds: {name: string, label: string, colour: string}[], totalOnDark: string,
 *   sequences: {name: string, tokens: Token[]}[]}} Content
 * @typedef {{get: (name: string) => any, set: (name: string, value: any) => void, on: (heard: () => void) => () => void}} Source
 */

const CSS = `
.wb-tokens{box-sizing:border-box;width:100%;min-width:0;font:12px/1.4 var(--jp-ui-font-family,system-ui,sans-serif);
color:var(--jp-ui-font-color1,CanvasText);
--wb-soft:var(--jp-ui-font-color2,color-mix(in srgb,currentColor 72%,transparent));--wb-ground:var(--jp-layout-color1,var(--page,Canvas));
--wb-line:var(--jp-border-color2,color-mix(in srgb,currentColor 25%,transparent))}
.wb-tokens *{box-sizing:border-box}
.wb-tokens-bar{display:flex;flex-wrap:wrap;gap:4px 14px;align-items:center;color:var(--wb-soft)}
.wb-tokens-bar label,.wb-tokens-scale{display:inline-flex;gap:5px;align-items:center}
.wb-tokens-bar :is(select,button){font:inherit;color:var(--jp-ui-font-color1,CanvasText);background:var(--wb-ground);
border:1px solid var(--wb-line);border-radius:3px;padding:2px 6px;height:26px}
.wb-tokens-bar button:disabled{opacity:.5}
.wb-tokens-ramp[hidden]{display:none}
.wb-tokens-ramp{width:72px;height:12px;border:1px solid var(--wb-line);border-radius:2px}
.wb-tokens-name{color:var(--wb-soft);margin:8px 0 0;font-size:11px}
.wb-tokens-text{margin:2px 0 6px;white-space:break-spaces;overflow-wrap:anywhere;font:14px/1.85 var(--jp-code-font-family,ui-monospace,monospace)}
.wb-token{border-radius:2px;padding:2px 0;cursor:pointer;box-decoration-break:clone;-webkit-box-decoration-break:clone;print-color-adjust:exact;
-webkit-print-color-adjust:exact}
.wb-token:hover{box-shadow:inset 0 0 0 1px currentColor}
.wb-token[aria-selected=true]{box-shadow:inset 0 -2px currentColor}
.wb-tokens :focus-visible{outline:2px solid var(--jp-brand-color1,currentColor);outline-offset:1px}
.wb-tokens-tip{position:fixed;inset:auto;margin:0;z-index:9;width:max-content;max-width:min(400px,100vw - 32px);padding:6px 9px;border-radius:4px;font-size:12px;
background:var(--wb-ground);color:inherit;border:1px solid var(--wb-line);box-shadow:0 1px 6px rgba(0,0,0,.4);pointer-events:none;overflow:visible}
.wb-tokens-tip.wb-pinned{pointer-events:auto}
.wb-tokens-tip b{font-weight:600}
.wb-tokens-tip p{margin:0;overflow-wrap:anywhere}
.wb-tokens-tip table{border-collapse:collapse;margin:4px 0 0;width:100%;font-size:12px}
.wb-tokens-tip :is(th,td){padding:1px 8px 1px 0;border:0;background:none;text-align:right;font-weight:400;white-space:nowrap}
.wb-tokens-tip :is(th,td):last-child{padding-right:0}
.wb-tokens-tip thead th{color:var(--wb-soft);font-size:11px}
.wb-tokens-tip :is(th:first-child){text-align:left;max-width:130px;overflow:hidden;text-overflow:ellipsis}
.wb-tokens-tip tbody th{font-family:var(--jp-code-font-family,ui-monospace,monospace)}
.wb-tokens-tip tr.wb-written :is(th,td){font-weight:700}
.wb-tokens-strip{position:relative;display:block;width:84px;height:9px;margin-bottom:5px;border-bottom:1px solid var(--wb-line)}
.wb-tokens-strip i{position:absolute;bottom:-4px;width:7px;height:7px;margin-left:-3px;border-radius:50%;background:currentColor;opacity:.55}
.wb-tokens-said{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%);white-space:nowrap}
@media (max-width:480px){.wb-tokens-strip{width:48px}.wb-tokens-tip :is(th:first-child){max-width:84px}}
@media print{.wb-tokens-tip,.wb-tokens-bar button{display:none}}
`;
const MOST = { light: 62, dark: 70, greyOnDark: 46 }; // opacity of the riskiest token in percent, at which letters are still readable
const HELP = "Arrow keys move from token to token, Home and End to the first and last, Page Up and Page Down between texts, Enter keeps " +
  "the alternatives open, Escape closes them.";

/** @param {string} tag @param {Record<string, string>} attributes @param {(Node | string)[]} children */
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

/** Format a number with a few digits. @param {number | null} value */
function digits(value) {
  return value === null ? "not finite" : value !== 0 && Math.abs(value) < 0.001 ? value.toExponential(0).replace("e-", "e−") : value.toFixed(3);
}

/** A token with visible spaces and line breaks. @param {string} word */
function marked(word) {
  return word === "" ? "∅" : word.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

/** A token as screen readers read it. @param {string} word */
function spoken(word) {
  /** @type {Record<string, string>} */
  const names = { "": "empty token", "\n": "line break", "\t": "tab" };
  return names[word] ?? (word.trim() === "" ? (word.includes("\n") ? "line break" : "space") : `“${word.trim()}”`);
}

/** From the lowest to the highest. @param {(number | null)[]} members */
function range(members) {
  const known = /** @type {number[]} */ (members.filter(value => value !== null));
  return known.length ? [Math.min(...known), Math.max(...known)] : [null, null];
}

/**
 * Show the text in an element.
 * @param {HTMLElement} el
 * @param {Source} source
 * @returns {() => void} takes it away again
 */
export function mount(el, source) {
  /** @type {Content} */
  const content = source.get("content");
  const { kinds, members } = content;
  const several = members > 1;
  /** @type {{element: HTMLElement, token: Token, sequence: number, place: number}[]} */
  const all = [];
  let at = 0; // the one token that Tab reaches
  let shown = -1, pinned = -1;

  // ---- elements
  const select = /** @type {HTMLSelectElement} */ (make("select", { "aria-label": "colour by" }));
  select.append(...kinds.map(({ name, label }) => make("option", { value: name }, label)));
  const none = make("span"), ramp = make("span", { class: "wb-tokens-ramp", "aria-hidden": "true" }), most = make("span");
  const riskiest = make("button", { type: "button" }, "Riskiest token");
  const tip = make("div", { class: "wb-tokens-tip", popover: "manual", hidden: "" });
  const said = make("div", { class: "wb-tokens-said", "aria-live": "polite", role: "status" });
  const texts = content.sequences.flatMap(({ name, tokens }, sequence) => {
    const heading = content.sequences.length > 1 ? [make("p", { class: "wb-tokens-name" }, name)] : [];
    if (!tokens.length) return [...heading, make("p", { class: "wb-tokens-name" }, "no tokens")];
    // dir=auto: by the first letter with a direction
    const text = make("div", {
      class: "wb-tokens-text", role: "listbox", dir: "auto", "aria-orientation": "horizontal", "aria-label": `${name}: ${tokens.length} tokens. ${HELP}`,
    });
    tokens.forEach((token, place) => {
      const word = token.word === "" ? "∅" : token.word.replaceAll("\n", "↵\n");
      const element = make("span", { class: "wb-token", role: "option", tabindex: "-1" }, word);
      element.dataset.place = String(all.length);
      all.push({ element, token, sequence, place });
      text.append(element);
    });
    return [...heading, text];
  });
  const root = make(
    "div", { class: "wb-tokens", "data-lm-suppress-shortcuts": "true" }, // keeps JupyterLab's shortcuts from taking its keys
    make("style", {}, CSS + (source.get("hides") ?? "")),
    make("div", { class: "wb-tokens-bar" }, make("label", {}, "colour by", select), make("span", { class: "wb-tokens-scale" }, none, ramp, most), riskiest),
    ...texts, tip, said,
  );
  el.replaceChildren(root);

  // ---- colours
  const dark = () => {
    const [r, g, b] = (getComputedStyle(root).color.match(/[\d.]+/g) ?? ["0", "0", "0"]).map(Number);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 127;
  };
  const chosen = () => Math.max(kinds.findIndex(kind => kind.name === source.get("kind")), 0);
  /** @param {number} share @param {number} k */
  function shade(share, k) {
    const onDark = dark(), grey = onDark && kinds[k].name === "total";
    const most = grey ? MOST.greyOnDark : onDark ? MOST.dark : MOST.light;
    return `color-mix(in srgb, ${grey ? content.totalOnDark : kinds[k].colour} ${(share * most).toFixed(1)}%, transparent)`;
  }
  function draw() {
    const k = chosen(), risks = all.map(({ token }) => token.risks[k]), known = risks.some(risk => risk !== null);
    const highest = Math.max(0, ...risks.map(risk => risk ?? 0));
    select.value = kinds[k].name;
    ramp.style.background = `linear-gradient(to right, transparent, ${shade(1, k)})`;
    ramp.hidden = highest === 0;
    none.textContent = highest > 0 ? "0" : "";
    most.textContent = highest > 0 ? `${digits(highest)} nats` : known ? "0 nats for every token" : all.length ? "finite for no token" : "";
    all.forEach(({ element, token, place, sequence }, i) => {
      const risk = token.risks[k], n = content.sequences[sequence].tokens.length;
      element.style.backgroundColor = highest > 0 && risk !== null ? shade(Math.max(risk, 0) / highest, k) : "";
      element.setAttribute("aria-label", `${spoken(token.word)}, ${kinds[k].label} ${digits(risk)} nats, token ${place + 1} of ${n}`);
      element.setAttribute("aria-selected", String(i === pinned));
      element.tabIndex = i === at ? 0 : -1;
    });
    riskiest.toggleAttribute("disabled", highest === 0);
  }

  // ---- alternatives
  /** @param {Token} token */
  function table(token) {
    const end = Math.max(1e-12, ...token.choices.flatMap(choice => choice[2].map(value => value ?? 0)));
    const heads = ["token", "probability", ...(several ? [`${members} members, 0 to ${digits(end)}`, "lowest to highest"] : [])];
    const head = make("thead", {}, make("tr", {}, ...heads.map(name => make("th", { scope: "col" }, name))));
    const body = make("tbody", {}, ...token.choices.map(([word, probability, each], i) => {
      const name = make("th", { scope: "row", title: word }, marked(word));
      const row = make("tr", i === token.written ? { class: "wb-written" } : {}, name, make("td", {}, digits(probability)));
      if (several) {
        const strip = make("span", { class: "wb-tokens-strip", "aria-hidden": "true" });
        strip.append(...each.filter(value => value !== null).map(value => {
          const dot = document.createElement("i");
          dot.style.left = `${(100 * /** @type {number} */ (value)) / end}%`;
          return dot;
        }));
        row.append(make("td", {}, strip), make("td", {}, each.length ? range(each).map(digits).join(" – ") : ""));
      }
      return row;
    }));
    return make("table", {}, head, body);
  }
  /** @param {Token} token */
  function words(token) {
    return token.choices.map(([word, probability, each], i) => {
      const spread = several && each.length ? `, members ${range(each).map(digits).join(" to ")}` : "";
      return `${spoken(word)}${i === token.written ? ", written," : ""} ${digits(probability)}${spread}`;
    }).join("; ");
  }
  function place() {
    if (shown < 0) return;
    const lines = all[shown].element.getClientRects(), edge = root.getBoundingClientRect();
    if (!lines.length) return;
    const first = lines[0], last = lines[lines.length - 1], wide = tip.offsetWidth, high = tip.offsetHeight;
    const below = last.bottom + 4, above = first.top - high - 4;
    const right = Math.min(edge.right, document.documentElement.clientWidth - 4) - wide;
    tip.style.left = `${Math.max(4, Math.min(first.left, right))}px`;
    tip.style.top = `${below + high <= window.innerHeight - 4 || above < 4 ? Math.max(4, Math.min(below, window.innerHeight - high - 4)) : above}px`;
  }
  /** @param {number} i */
  function show(i) {
    shown = i;
    tip.hidden = i < 0;
    tip.classList.toggle("wb-pinned", i >= 0 && i === pinned);
    if (i < 0) {
      if (tip.matches(":popover-open")) tip.hidePopover();
      return;
    }
    const { token } = all[i];
    tip.replaceChildren(
      make("p", {}, make("b", {}, marked(token.word)), ` ${digits(token.choices[token.written][1])}`),
      make("p", {}, `${kinds.map(({ label }, k) => `${label} ${digits(token.risks[k])}`).join(" · ")} nats`), table(token),
    );
    if (tip.showPopover && !tip.matches(":popover-open")) tip.showPopover(); // above everything, and not clipped
    place();
  }
  /** @param {number} i */
  function pin(i) {
    pinned = i;
    draw();
    show(i);
  }

  // ---- pointer, touch and keys
  const placeOf = (/** @type {EventTarget | null} */ target) => {
    const element = target instanceof Element ? target.closest(".wb-token") : null;
    return element instanceof HTMLElement && root.contains(element) ? Number(element.dataset.place) : -1;
  };
  root.addEventListener("pointerover", event => {
    const i = placeOf(event.target);
    if (event.pointerType === "mouse" && pinned < 0 && i >= 0) show(i);
  });
  root.addEventListener("pointerout", event => {
    if (event.pointerType === "mouse" && pinned < 0 && placeOf(event.relatedTarget) < 0) show(-1);
  });
  root.addEventListener("click", event => {
    const i = placeOf(event.target);
    if (i >= 0) pin(i === pinned ? -1 : i);
  });
  root.addEventListener("focusin", event => {
    const i = placeOf(event.target);
    if (i < 0) return;
    at = i;
    if (pinned >= 0 && pinned !== i) pinned = -1;
    draw();
    show(i);
    said.textContent = words(all[i].token);
  });
  root.addEventListener("focusout", event => {
    if (pinned < 0 && !(event.relatedTarget instanceof Node && root.contains(event.relatedTarget))) show(-1);
  });
  const elsewhere = (/** @type {Event} */ event) => {
    if (pinned >= 0 && !event.composedPath().includes(root)) pin(-1);
  };
  document.addEventListener("pointerdown", elsewhere);

  /** The nearest token of the next line above or below. @param {number} down 1 or -1 */
  function line(down) {
    const middle = (/** @type {DOMRect} */ box) => (box.left + box.right) / 2;
    const now = all[at].element.getClientRects()[0];
    let found = at, least = Infinity;
    all.forEach(({ element }, i) => {
      for (const box of element.getClientRects()) {
        const away = down * (box.top - now.top);
        const distance = 1e4 * Math.round(away / 4) + Math.abs(middle(box) - middle(now));
        if (away > 4 && distance < least) [found, least] = [i, distance];
      }
    });
    return found;
  }
  /** @param {number} i */
  const go = i => all[Math.min(Math.max(i, 0), all.length - 1)]?.element.focus();
  root.addEventListener("keydown", event => {
    if (event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.key === "Escape" && shown >= 0) pin(-1);
    else {
      if (placeOf(event.target) < 0) return;
      const { sequence } = all[at], [one, step] = [at, getComputedStyle(all[at].element).direction === "rtl" ? -1 : 1];
      const begin = (/** @type {number} */ number) => all.findIndex(token => token.sequence === number);
      /** @type {Record<string, () => number>} */
      const moves = {
        ArrowRight: () => one + step, ArrowLeft: () => one - step, ArrowDown: () => line(1), ArrowUp: () => line(-1),
        Home: () => begin(sequence), End: () => begin(sequence) + content.sequences[sequence].tokens.length - 1,
        PageDown: () => (sequence < all[all.length - 1].sequence ? all.findIndex(token => token.sequence > sequence) : one),
        PageUp: () => begin(all[Math.max(begin(sequence) - 1, 0)].sequence),
      };
      if (event.key in moves) go(moves[event.key]());
      else if (event.key === "Enter" || event.key === " ") pin(pinned === at ? -1 : at);
      else return;
    }
    event.preventDefault();
    event.stopPropagation();
  });
  select.addEventListener("change", () => { source.set("kind", select.value); draw(); });
  riskiest.addEventListener("click", () => {
    const k = chosen(), risks = all.map(({ token }) => token.risks[k] ?? -Infinity);
    go(risks.indexOf(Math.max(...risks)));
  });

  // ---- changes from outside
  const forget = source.on(draw);
  const themed = new MutationObserver(() => [0, 150, 600].forEach(wait => setTimeout(draw, wait))); // styles of a new theme arrive later
  themed.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light", "data-jp-theme-name"] });
  const media = ["(prefers-color-scheme: dark)", "print"].map(query => window.matchMedia(query));
  media.forEach(query => query.addEventListener("change", draw));
  window.addEventListener("scroll", place, { capture: true, passive: true });
  window.addEventListener("resize", place);
  draw();
  const first = requestAnimationFrame(draw); // once it is in the page, whose styles decide whether it is dark
  return () => {
    forget();
    cancelAnimationFrame(first);
    document.removeEventListener("pointerdown", elsewhere);
    themed.disconnect();
    media.forEach(query => query.removeEventListener("change", draw));
    window.removeEventListener("scroll", place, { capture: true });
    window.removeEventListener("resize", place);
  };
}

/** Turn every element of a page that has the data of a text into one. @param {ParentNode} page */
export function upgrade(page = document) {
  for (const element of page.querySelectorAll("[data-wb-tokens]")) {
    const el = /** @type {HTMLElement} */ (element), kept = [...el.childNodes];
    try {
      const state = JSON.parse(el.dataset.wbTokens ?? "");
      mount(el, { get: name => state[name], set: (name, value) => { state[name] = value; }, on: () => () => {} });
      el.removeAttribute("data-wb-tokens");
    } catch (error) { // keep its static text
      el.replaceChildren(...kept);
      console.warn("workbench: the tokens of a text can't be read", error);
    }
  }
}

/** Entry point of anywidget. @param {{model: any, el: HTMLElement}} given */
function render({ model, el }) {
  return mount(el, {
    get: name => model.get(name),
    set: (name, value) => { model.set(name, value); model.save_changes(); },
    on: heard => { model.on("change", heard); return () => model.off("change", heard); },
  });
}

export default { render };
