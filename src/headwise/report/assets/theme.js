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

// On paper everything is unfolded.
let folded = [];
addEventListener("beforeprint", () => {
  folded = [...document.querySelectorAll("details:not([open]):not(.table)")];
  for (const part of folded) part.open = true;
});
addEventListener("afterprint", () => { for (const part of folded) part.open = false; });
