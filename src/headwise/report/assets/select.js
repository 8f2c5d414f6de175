// A layer chosen anywhere is shown everywhere: whatever carries data-layer belongs to it.
const count = data.layers;
const chooser = document.getElementById("layer");
let picked = null;

function select(layer) {
  picked = layer;
  document.body.classList.toggle("picked", layer !== null);
  for (const part of document.querySelectorAll(".on[data-layer]")) part.classList.remove("on");
  if (layer !== null) {
    for (const part of document.querySelectorAll(`[data-layer="${layer}"]`)) part.classList.add("on");
  }
  if (chooser) chooser.value = layer === null ? "" : String(layer);
  document.dispatchEvent(new CustomEvent("layer", { detail: layer }));
}

function step(by) {
  const start = by > 0 ? -1 : count;
  select(Math.min(count - 1, Math.max(0, (picked === null ? start : picked) + by)));
}

document.addEventListener("click", (event) => {
  const part = event.target.closest("[data-layer]");
  if (!part || event.target.closest("button, a, summary, input")) return;
  const layer = Number(part.dataset.layer);
  select(layer === picked ? null : layer);
});

// Every picture of layers takes the focus; up and down walk through the layers there.
for (const area of document.querySelectorAll(".pickable")) {
  area.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      step(event.key === "ArrowDown" ? 1 : -1);
    }
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && picked !== null) select(null);
});
if (chooser) {
  chooser.addEventListener("change", () => select(chooser.value === "" ? null : Number(chooser.value)));
  document.getElementById("layer-before").addEventListener("click", () => step(-1));
  document.getElementById("layer-after").addEventListener("click", () => step(1));
}
