"""The page's style: system font, one accent, light and dark, narrow screens and paper."""

from __future__ import annotations

# Units have their own colours, from the set of Okabe and Ito that colour-blind readers can tell apart.
CSS = """
:root{color-scheme:light dark;--bg:#fff;--ink:#1c2024;--soft:#5b6470;--line:#dfe3e8;--card:#f6f7f9;--accent:#0b63a5;
--ghost:#d9dee4;--mid:#8fbadd;--bad:#a33a00;--u-qk:#0072b2;--u-v:#e69f00;--u-mlp:#009e73;--u-heads:#cc79a7;--u-kv_heads:#56b4e9;--u-depth:#d55e00}
@media(prefers-color-scheme:dark){:root{--bg:#14171a;--ink:#e6e9ec;--soft:#9aa4ae;--line:#2c3238;--card:#1c2126;
--accent:#62b0ee;--ghost:#343c44;--mid:#33688f;--bad:#ff9d66;--u-qk:#1280c4;--u-mlp:#1fb78d;--u-kv_heads:#9ad5f7}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main,header{max-width:1080px;margin:0 auto;padding:0 20px}
header{padding-top:40px}
h1{font-size:1.15rem;font-weight:600;margin:0 0 12px;color:var(--soft);overflow-wrap:anywhere}
h2{font-size:1.35rem;line-height:1.25;margin:72px 0 6px}
h3{font-size:1rem;margin:28px 0 6px}
p{max-width:72ch;margin:8px 0}
.lead{font-size:1.45rem;line-height:1.4;max-width:46ch;margin:0 0 18px;overflow-wrap:anywhere}
.note,figcaption,caption,dt{color:var(--soft);font-size:.875rem}
.status{display:inline-block;border:1.5px solid currentColor;border-radius:999px;padding:2px 12px;font-weight:600;
font-size:.875rem;color:var(--accent);margin:0 0 14px}
.bad{color:var(--bad)}
nav{margin:24px 0 0;font-size:.875rem}
nav a{color:var(--soft);margin-right:14px;white-space:nowrap}
a{color:var(--accent)}
.grid{display:grid;gap:24px;grid-template-columns:repeat(auto-fit,minmax(min(100%,var(--min,220px)),1fr));margin:20px 0}
.grid>*{min-width:0}
.card{background:var(--card);border-radius:10px;padding:16px 18px}
.card h3{margin:0;font-size:.875rem;font-weight:500;color:var(--soft)}
.big{font-size:1.8rem;font-weight:600;line-height:1.25;margin:4px 0 0;font-variant-numeric:tabular-nums}
.big small{font-size:.95rem;font-weight:400;color:var(--soft)}
.card p{margin:0 0 10px;font-size:.875rem;color:var(--soft)}
figure{margin:0}
figure h3{margin:0 0 4px}
svg{display:block;width:100%;height:auto;overflow:visible;
font:8.5px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums}
.maps{--min:170px}svg.map{max-width:260px;font-size:9.3px}svg.rows{max-width:600px;font-size:9px}svg.chart{max-width:640px;font-size:10px}
.minis{--min:150px}svg.mini{max-width:220px}
.t{fill:var(--ink)}.m{fill:var(--soft)}.s{fill:var(--soft);font-size:7.5px}.n{font-weight:600}
.k{fill:var(--accent)}.g{fill:var(--ghost)}.h{fill:var(--mid)}.b{stroke:var(--bg);stroke-width:1.5}
.o{fill:var(--bg);stroke:var(--ink);stroke-width:1.4}
.l,.c,.e,.f,.w,.x{fill:none}.l{stroke:var(--line)}.c{stroke:var(--accent);stroke-width:1.5}
.d,.r{fill:none;stroke:var(--accent)}.d{stroke-width:5.5;stroke-linecap:round;opacity:.55}.r{stroke:var(--ink)}
.e{stroke:var(--soft);stroke-dasharray:2 2}.f{stroke:var(--accent);opacity:.6}.w,.x{stroke:var(--ink);stroke-width:1.4}
.u-qk{fill:var(--u-qk)}.u-v{fill:var(--u-v)}.u-mlp{fill:var(--u-mlp)}.u-heads{fill:var(--u-heads)}.u-kv_heads{fill:var(--u-kv_heads)}.u-depth{fill:var(--u-depth)}
[class^=u-]{stroke:var(--bg);stroke-width:.8}
.legend{list-style:none;padding:0;margin:10px 0;display:flex;flex-wrap:wrap;gap:4px 18px;font-size:.875rem}
.legend svg{display:inline-block;width:14px;height:14px;margin-right:6px;vertical-align:-2px}
.scroll{overflow-x:auto;margin:14px 0}
table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
caption{text-align:left;padding:0 0 4px}
th,td{text-align:left;padding:6px 18px 6px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{font-weight:600;white-space:nowrap}td.num,th.num{text-align:right;white-space:nowrap}
td{overflow-wrap:anywhere;min-width:4.5em}tr.now td{font-weight:600}td.pass,td.fail{white-space:nowrap;font-weight:600}
td.fail{color:var(--bad)}
pre{background:var(--card);border-radius:8px;padding:12px 16px;white-space:pre-wrap;overflow-wrap:anywhere;
font-size:.85rem;margin:12px 0}
code{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;font-size:.9em;overflow-wrap:anywhere}
summary{cursor:pointer;padding:8px 0;font-weight:600;overflow-wrap:anywhere}
details .grid{gap:14px}
.sample{border-top:1px solid var(--line);padding:14px 0}
.sample p{white-space:pre-wrap;overflow-wrap:anywhere;margin:2px 0}
footer{color:var(--soft);font-size:.875rem;margin:72px 0 40px}
@media(max-width:520px){.lead{font-size:1.2rem}h2{margin-top:52px}main,header{padding:0 16px}header{padding-top:24px}
.maps,.minis{--min:136px}.grid.maps,.grid.minis{gap:18px 12px}}
@media print{body{font-size:11pt}nav{display:none}h2{margin-top:28px}figure,.card,tr,.sample{break-inside:avoid}
h2,h3{break-after:avoid}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
