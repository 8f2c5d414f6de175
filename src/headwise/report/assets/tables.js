// Tables sort by their heads and leave as CSV.
function amount(words) {
  const plain = words.replace(/[,%\s]/g, "").replace("−", "-");
  const scale = { T: 1e12, B: 1e9, M: 1e6 }[plain.slice(-1)];
  const value = parseFloat(plain);
  return Number.isNaN(value) ? null : value * (scale || 1);
}

function sortBy(table, column, falling) {
  const body = table.tBodies[0];
  const keyed = [...body.rows].map((row) => [row.cells[column].textContent.trim(), row]);
  const numbers = keyed.filter(([words]) => amount(words) !== null).length * 2 > keyed.length;
  const order = (a, b) => {
    if (!numbers) return a.localeCompare(b);
    const [x, y] = [amount(a), amount(b)];
    return x === null ? (y === null ? 0 : 1) : y === null ? -1 : x - y;
  };
  keyed.sort((a, b) => (falling ? order(b[0], a[0]) : order(a[0], b[0])));
  body.append(...keyed.map(([, row]) => row));
  [...table.tHead.rows[0].cells].forEach((cell, index) => {
    if (index === column) cell.setAttribute("aria-sort", falling ? "descending" : "ascending");
    else cell.removeAttribute("aria-sort");
  });
}

// A spreadsheet would run what begins like a formula.
function field(words) {
  const text = words.trim();
  const safe = /^[=+@\-\t]/.test(text) && amount(text) === null ? `'${text}` : text;
  return /[",\n\r]/.test(safe) ? `"${safe.replaceAll('"', '""')}"` : safe;
}

function csvOf(table) {
  const rows = [...table.tHead.rows, ...table.tBodies[0].rows];
  return rows.map((row) => [...row.cells].map((cell) => field(cell.textContent)).join(",")).join("\r\n") + "\r\n";
}

function equip(table, name) {
  [...table.tHead.rows[0].cells].forEach((cell, column) => {
    if (!cell.textContent.trim()) return;
    const button = Object.assign(document.createElement("button"), { type: "button" });
    button.append(...cell.childNodes);
    cell.append(button);
    button.addEventListener("click", () => sortBy(table, column, cell.getAttribute("aria-sort") === "ascending"));
  });
  const button = Object.assign(document.createElement("button"), { type: "button", className: "csv", textContent: "CSV ↓" });
  button.setAttribute("aria-label", `Download ${name} as CSV`);
  button.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([csvOf(table)], { type: "text/csv" }));
    link.download = `${name.replace(/[^A-Za-z0-9._-]+/g, "-").slice(0, 60)}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
  table.parentElement.after(button);
}

for (const table of document.querySelectorAll("table[data-name]")) equip(table, table.dataset.name);
