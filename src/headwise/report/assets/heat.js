// Heat maps: a pixel per value, enlarged by the browser. Cividis, which the colour-blind read as others do.
const SCALE = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"]
  .map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));

function colour(part) {
  const place = Math.min(1, Math.max(0, part)) * (SCALE.length - 1);
  const low = Math.floor(place), high = Math.min(SCALE.length - 1, low + 1);
  return SCALE[low].map((value, i) => Math.round(value + (SCALE[high][i] - value) * (place - low)));
}

function level(map, value) {
  const [low, high] = map.ends;
  if (high <= low) return 0.5;
  if (!map.log) return (value - low) / (high - low);
  return Math.log(Math.max(value, low) / low) / Math.log(high / low);
}

function digits(value) {
  if (value === null) return "–";
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
}

function drawHeat(map) {
  const box = document.getElementById(map.name);
  if (!box) return;
  const canvas = box.querySelector("canvas"), ring = box.querySelector(".ring"), read = box.querySelector(".read");
  const wide = map.ticks.length, high = map.rows.length;
  canvas.width = wide;
  canvas.height = high;
  const each = Math.max(3, Math.min(22, 260 / high));
  canvas.style.height = `${Math.round(each * high)}px`;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(wide, high);
  map.rows.forEach((row, y) => row.forEach((value, x) => {
    if (value === null) return;
    pixels.data.set([...colour(level(map, value)), 255], 4 * (y * wide + x));
  }));
  context.putImageData(pixels, 0, 0);
  box.querySelector(".key i").style.background =
    `linear-gradient(90deg,${SCALE.map((rgb) => `rgb(${rgb.join(",")})`).join(",")})`;
  let cell = [0, 0];
  const say = (x, y) => {
    cell = [x, y];
    const error = map.errors && map.errors[y][x] !== null ? ` ± ${digits(map.errors[y][x])}` : "";
    const mark = map.chosen[y] === map.ticks[x] ? ", the size that was chosen" : "";
    read.textContent = `${map.names[y]}, ${map.axis} ${map.ticks[x]}: ${digits(map.rows[y][x])}${error} ${map.unit}${mark}`;
  };
  const at = (event) => {
    const area = canvas.getBoundingClientRect();
    const x = Math.floor((event.clientX - area.left) / area.width * wide);
    const y = Math.floor((event.clientY - area.top) / area.height * high);
    return [Math.min(wide - 1, Math.max(0, x)), Math.min(high - 1, Math.max(0, y))];
  };
  canvas.addEventListener("pointermove", (event) => say(...at(event)));
  canvas.addEventListener("click", (event) => {
    const [x, y] = at(event);
    say(x, y);
    if (high > 1) select(y);
  });
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!by) return;
    event.preventDefault();
    say(Math.min(wide - 1, Math.max(0, cell[0] + by[0])), Math.min(high - 1, Math.max(0, cell[1] + by[1])));
    if (high > 1 && by[1]) select(cell[1]);
  });
  document.addEventListener("layer", ({ detail }) => {
    ring.style.display = detail === null || high < 2 ? "none" : "block";
    ring.style.top = `calc(${100 * detail / high}% - 2px)`;
    ring.style.height = `calc(${100 / high}% + 4px)`;
  });
  const folder = box.closest(".reading").querySelector("details.table");
  folder.addEventListener("toggle", () => fillTable(folder, map), { once: true });
}

// The same numbers as a table, made when it is opened.
function fillTable(folder, map) {
  const table = document.createElement("table");
  const head = table.createTHead().insertRow();
  for (const name of [map.axis, ...map.ticks]) {
    const cell = Object.assign(document.createElement("th"), { textContent: name, scope: "col" });
    if (name !== map.axis) cell.className = "num";
    head.append(cell);
  }
  const body = table.createTBody();
  map.rows.forEach((values, layer) => {
    const row = body.insertRow();
    if (map.rows.length > 1) row.dataset.layer = layer;
    row.append(Object.assign(document.createElement("th"), { textContent: map.names[layer], scope: "row" }));
    for (const value of values) Object.assign(row.insertCell(), { textContent: digits(value), className: "num" });
  });
  const scroll = Object.assign(document.createElement("div"), { className: "scroll", tabIndex: 0 });
  scroll.setAttribute("role", "region");
  scroll.setAttribute("aria-label", `${map.kind} as a table`);
  scroll.append(table);
  folder.append(scroll);
  equip(table, map.kind);
  select(picked);
}

for (const map of data.heats) drawHeat(map);
