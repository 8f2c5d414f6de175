// Light or dark: as the system says, until the reader says otherwise. Storage may be forbidden for files.
const switcher = document.getElementById("theme");
const remembered = (() => {
  try { return localStorage.getItem("headwise-theme"); } catch { return null; }
})();
function isDark() {
  const asked = document.documentElement.dataset.theme;
  return asked ? asked === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}
function showTheme() {
  switcher.textContent = isDark() ? "Light" : "Dark";
  switcher.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
}
if (remembered === "dark" || remembered === "light") document.documentElement.dataset.theme = remembered;
switcher.addEventListener("click", () => {
  const theme = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("headwise-theme", theme); } catch { /* it lasts as long as the page */ }
  showTheme();
});
switcher.hidden = false;
showTheme();

function toast(words) {
  const box = document.getElementById("toast");
  box.textContent = words;
  setTimeout(() => { box.textContent = ""; }, 1800);
}

// Commands and code can be copied.
for (const code of document.querySelectorAll("pre.copy > code")) {
  const button = Object.assign(document.createElement("button"), { type: "button", textContent: "Copy" });
  button.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(code.textContent);
      toast("Copied");
    } catch {
      getSelection().selectAllChildren(code);
      toast("Marked: copy with your keyboard");
    }
  });
  code.parentElement.append(button);
}

// On a narrow screen the links are behind a button.
const menu = document.getElementById("menu");
if (menu) {
  const open = (is) => menu.setAttribute("aria-expanded", String(is));
  menu.hidden = false;
  menu.parentElement.classList.add("folds");
  menu.addEventListener("click", () => open(menu.getAttribute("aria-expanded") !== "true"));
  document.getElementById("links").addEventListener("click", () => open(false));
  document.addEventListener("keydown", (event) => { if (event.key === "Escape") open(false); });
}

// A link to a folded part unfolds it.
function unfold() {
  const name = location.hash.slice(1);
  for (let part = name && document.getElementById(name); part; part = part.parentElement) {
    if (part.tagName === "DETAILS") part.open = true;
  }
}
addEventListener("hashchange", unfold);
unfold();
