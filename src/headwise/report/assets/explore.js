// The budget slider: every answer was solved beforehand; here it is only shown.
const sweep = data.explorer;
const sizes = { heads: 0, kv: 1, qk: 2, v: 3, mlp: 4, width: 5 }; // as layer shapes are written
const short = (value) => String(Math.floor(value * 1000 + 0.5) / 1000);

// The same dashed lines as the page was written with: a dash is a head.
function dashes(heads, group, start, height, gap) {
  const runs = [];
  for (const head of heads) {
    const last = runs[runs.length - 1];
    if (last && head === last[last.length - 1] + 1 && head % group) last.push(head);
    else runs.push([head]);
  }
  const y = short(1 - height / 2);
  return runs.map((run) => {
    const x = run[0] + (group > 1 ? gap * Math.floor(run[0] / group) : 0) + start;
    return `M${short(x)} ${y}h${short(run.length - 0.58)}`;
  }).join("");
}

// Which query heads stay: the most needed of every group that stays.
function keptHeads(layer, shape, source) {
  const [queries, groups] = shape;
  const per = source[sizes.kv] ? source[sizes.heads] / source[sizes.kv] : 1;
  if (queries === source[sizes.heads]) return [...Array(queries).keys()];
  if (!queries) return [];
  const order = (sweep.orders && sweep.orders[layer]) || {};
  const all = [...Array(source[sizes.kv]).keys()];
  const kept = (order.kv_heads ? order.kv_heads[0] : all).slice(0, groups).sort((a, b) => a - b);
  const each = queries / groups;
  return kept.flatMap((group) => {
    const inside = order.heads ? order.heads[group] : [...Array(per).keys()];
    return inside.slice(0, each).sort((a, b) => a - b).map((head) => group * per + head);
  });
}

// Heights of keys and values: their dimensions or, where the cache is coded, what is left of these at so many bits.
function heights(layer, shape, bits) {
  if (!bits) return [shape[sizes.qk], shape[sizes.v]];
  return sweep.bits.rows[layer].map((size, part) => size * Number(bits[part]) / sweep.bits.whole);
}

function bitsOf(layer, place) {
  return sweep.bits && sweep.bits.layers[layer][place];
}

// A layer's damage in few letters, as the page was written with.
function damageText(value) {
  if (value > 0 && value < 1e-5) return "<0.00001";
  return String(Number(value.toPrecision(value >= 1e-3 || value <= 0 ? 2 : 1)));
}

// Bars of damage keep one logarithmic scale at every budget.
function damageLevel(value) {
  const [low, high] = sweep.scale;
  return value > 0 ? Math.min(1, Math.max(0.02, Math.log(value / low) / Math.log(high / low))) : 0;
}

function drawLayer(row, layer, place, heads, damage) {
  const shape = sweep.shapes[place], bits = bitsOf(layer, place), before = bitsOf(layer, sweep.source[layer]);
  const source = sweep.shapes[sweep.source[layer]];
  const [full, widest, gap, share] = sweep.full;
  const group = Math.max(1, source[sizes.kv] ? source[sizes.heads] / source[sizes.kv] : 1);
  const gone = !shape[sizes.heads] && !shape[sizes.mlp];
  const wider = shape[sizes.width] > shape[sizes.qk] && !bits;
  const through = wider ? Math.min(shape[sizes.width], source[sizes.qk]) : 0;
  const [keys, values] = heights(layer, shape, bits);
  const lines = { wide: [0.08, through], q: [0.08, keys], v: [0.5, values] };
  for (const [name, [start, size]] of Object.entries(lines)) {
    const path = row.querySelector(`.c-after .${name}`);
    path.setAttribute("d", dashes(heads, group, start, size / full, gap));
    path.setAttribute("stroke-width", short(size / full));
  }
  ["heads", "qk", "v"].forEach((name, index) => {
    const cell = row.querySelector(`.n-${name}`), coded = bits && index > 0;
    const was = coded ? before[index - 1] : source[sizes[name]];
    const is = coded ? bits[index - 1] : shape[sizes[name]];
    cell.firstChild.nodeValue = String(is);
    cell.classList.toggle("cut", was !== is);
  });
  const mlp = row.querySelector(".b-mlp");
  if (mlp) {
    mlp.style.width = `${(share * shape[sizes.mlp] / widest).toFixed(1)}%`;
    row.querySelector(".c-mlp .sr").textContent = `${shape[sizes.mlp]}/${source[sizes.mlp]}`;
  }
  const bar = row.querySelector(".b-dmg");
  if (bar) {
    bar.style.width = `${(100 * damageLevel(damage)).toFixed(1)}%`;
    row.querySelector(".c-damage > span:last-child").textContent = damageText(damage);
  }
  row.classList.toggle("removed", gone);
}

// Damage of layers that are gone is known of all together, so each has its share of what the rest leaves.
function layerDamages(layers, total) {
  const known = layers.map((place, layer) => sweep.damage[layer][place]);
  const gone = known.filter((value) => value === null).length;
  const rest = known.reduce((sum, value) => sum + (value || 0), 0);
  return known.map((value) => (value === null ? Math.max(0, total - rest) / gone : value || 0));
}

function showAnswer(place) {
  const own = place === null;
  const answer = sweep.answers[own ? sweep.at : place];
  const layers = own ? sweep.own : answer.layers;
  const damages = layerDamages(layers, own ? sweep.predicted : answer.damage);
  layers.forEach((shapePlace, layer) => {
    const shape = sweep.shapes[shapePlace];
    const heads = own && sweep.kept ? sweep.kept[layer] : keptHeads(layer, shape, sweep.shapes[sweep.source[layer]]);
    drawLayer(rows[layer], layer, shapePlace, heads, damages[layer]);
  });
  put("budget-text", answer.text);
  put("budget-damage", own ? sweep.ownWords : answer.words);
  put("budget-proof", own ? sweep.ownProof : answer.proof);
  markPreview(own ? null : answer.text);
  const costs = own ? sweep.ownCosts : answer.costs;
  document.querySelectorAll("#costs tbody tr").forEach((row, index) => {
    row.cells[2].textContent = costs[index][0];
    row.cells[3].textContent = costs[index][1];
  });
  put("budget-command", own ? sweep.ownCommand : answer.command);
  slider.setAttribute("aria-valuetext", `${answer.text}, ${own ? "this run" : "preview"}, predicted ${answer.words}`);
  moveCursor(answer);
  document.dispatchEvent(new CustomEvent("answer", { detail: layers }));
}

// What is shown belongs to this run, or is a preview of a model that was not built: every part of it says which.
function markPreview(text) {
  const own = text === null;
  put("budget-state", own ? "this run" : "preview, not built");
  put("budget-whose", own ? "This run" : "Preview");
  put("preview-text", own ? "" : text);
  document.getElementById("preview").hidden = own;
  document.getElementById("map").classList.toggle("previewing", !own);
  document.querySelector("#model .c-after").textContent = own ? "after" : "preview";
  document.querySelector("#costs th:nth-child(3)").textContent = own ? "after" : "preview";
  if (data.explorer) remember(text);
}

// The slider's place is part of the address, so that it can be sent to somebody.
const PLACE = "#budget=";
function remember(text) {
  const wanted = text === null ? "" : PLACE + encodeURIComponent(text);
  const there = location.hash.startsWith(PLACE) ? location.hash : "";
  if (wanted === there) return;
  try { history.replaceState(null, "", wanted || location.pathname + location.search); } catch { /* a page inside another has no address */ }
}

function fromAddress() {
  if (!location.hash.startsWith(PLACE)) return;
  let asked = "";
  try { asked = decodeURIComponent(location.hash.slice(PLACE.length)); } catch { return; }
  const place = sweep.answers.findIndex((answer) => answer.text === asked);
  if (place < 0) return;
  slider.value = place;
  showAnswer((shown = place));
}

function put(name, words) {
  document.getElementById(name).textContent = words;
}

// The chart of the frontier follows the slider, and a click on it moves the slider.
const chart = document.querySelector("svg.chart[data-scale]");
function moveCursor(answer) {
  if (!chart) return;
  const [low, high, left, right, least, most, bottom, top] = JSON.parse(chart.dataset.scale);
  const x = left + (answer.share - low) / (high - low) * (right - left);
  const level = Math.log(Math.max(least, Math.min(most, answer.damage)) / least) / Math.log(most / least);
  const cursor = chart.querySelector(".cursor");
  cursor.setAttribute("transform", `translate(${x.toFixed(1)} 0)`);
  cursor.querySelector("circle").setAttribute("cy", (bottom + level * (top - bottom)).toFixed(1));
}

const slider = document.getElementById("budget");
const rows = [...document.querySelectorAll("#model tbody tr")];
let shown = null; // null: the run itself
if (sweep && slider) {
  slider.max = sweep.answers.length - 1;
  slider.value = sweep.at;
  slider.disabled = false;
  slider.addEventListener("input", () => showAnswer((shown = Number(slider.value))));
  document.getElementById("own").addEventListener("click", () => {
    slider.value = sweep.at;
    showAnswer((shown = null));
    slider.focus();
  });
  if (chart) {
    chart.addEventListener("click", (event) => {
      const [low, high, left, right] = JSON.parse(chart.dataset.scale);
      const box = chart.getBoundingClientRect();
      const x = (event.clientX - box.left) / box.width * chart.viewBox.baseVal.width;
      const share = low + (x - left) / (right - left) * (high - low);
      const away = sweep.answers.map((answer) => Math.abs(answer.share - share));
      slider.value = away.indexOf(Math.min(...away));
      showAnswer((shown = Number(slider.value)));
    });
  }
  const address = location.hash;
  if (!address.startsWith(PLACE)) showAnswer(null);
  fromAddress();
  if (shown === null && address.startsWith(PLACE)) showAnswer(null);
  addEventListener("hashchange", fromAddress);
}

// The chosen layer in words.
const inspector = document.getElementById("inspect");
function inspect() {
  if (!inspector) return;
  inspector.hidden = picked === null;
  if (picked === null) return;
  const lines = (data.facts[picked] || []).slice();
  const names = ["query heads", "key/value heads", "query/key dim", "value dim", "MLP width"];
  if (sweep && shown !== null) {
    const before = sweep.shapes[sweep.source[picked]];
    const after = sweep.shapes[sweep.answers[shown].layers[picked]];
    const bits = bitsOf(picked, sweep.answers[shown].layers[picked]);
    const parts = names.map((name, i) => {
      const said = bits && (i === sizes.qk || i === sizes.v); // in bits
      return said || before[i] === after[i] ? null : `${name} ${before[i]} → ${after[i]}`;
    });
    if (bits) parts.unshift(`keys ${bits[0]} bits, values ${bits[1]} bits`);
    lines.unshift([`Preview at ${sweep.answers[shown].text}`, parts.filter(Boolean).join(", ") || "nothing is cut"]);
  }
  inspector.replaceChildren(...[["Layer " + picked, ""], ...lines].map(([name, words], index) => {
    const item = document.createElement(index ? "div" : "h3");
    item.append(index ? `${name}: ` : name);
    if (words) item.append(Object.assign(document.createElement("b"), { textContent: words }));
    return item;
  }));
}
document.addEventListener("layer", inspect);
document.addEventListener("answer", inspect);
