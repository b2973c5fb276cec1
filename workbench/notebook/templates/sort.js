for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const first = head.dataset.first, now = head.getAttribute("aria-sort");
    const order = now === "ascending" ? "descending" : now === "descending" ? "ascending" : first;
    const sign = order === "ascending" ? 1 : -1, value = row => row.cells[column].dataset.value;
    const missing = text => text === "" || text === "nan";
    const compare = (a, b) => missing(a) || missing(b) ? missing(a) - missing(b)
      : sign * (isNaN(a) || isNaN(b) ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
    heads.forEach(other => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", order);
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
  }));
}
