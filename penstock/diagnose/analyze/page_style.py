"""How the page of a report looks, in light and in dark, and the little that it does."""

STYLE = """
:root {
  color-scheme: light dark;
  --page: #f4f6f9; --card: #ffffff; --ink: #1a2230; --muted: #566174; --edge: #dde2ea;
  --grid: #e6eaf0; --code: #f0f3f7; --accent: #15509e; --area: rgba(26, 34, 48, 0.06);
  --compute: #0d6a92; --prep: #8f5500; --fetch: #b02441; --plain: #566174;
  --compute-fill: #2b93bd; --prep-fill: #e39a2d; --fetch-fill: #d64a63; --plain-fill: #8793a5;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #0e131a; --card: #161d27; --ink: #e7ecf3; --muted: #a0acbd; --edge: #2a3443;
    --grid: #242e3b; --code: #0f151d; --accent: #8fbcff; --area: rgba(231, 236, 243, 0.07);
    --compute: #62bfe4; --prep: #f2b14b; --fetch: #ff8b9b; --plain: #a0acbd;
    --compute-fill: #3d9fc7; --prep-fill: #dd9a35; --fetch-fill: #e2606f; --plain-fill: #74819a;
  }
}
* { box-sizing: border-box }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial,
    "DejaVu Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 56px }
h1 { font-size: clamp(1.9rem, 5vw, 2.7rem); line-height: 1.15; margin: 2px 0 8px;
  letter-spacing: -0.02em }
h2 { font-size: 1.25rem; margin: 40px 0 14px; letter-spacing: -0.01em }
h3 { font-size: 1rem; margin: 0 }
p { margin: 0 0 8px }
.eyebrow { color: var(--muted); font-size: 0.85rem; margin: 0 }
.lead { font-size: 1.1rem; max-width: 46em }
.facts { color: var(--muted); font-size: 0.9rem; overflow-wrap: anywhere }
.is-compute { color: var(--compute) } .is-prep { color: var(--prep) }
.is-fetch { color: var(--fetch) }
code, pre { font: 0.88rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  monospace }
pre { margin: 0; padding: 12px 14px; background: var(--code); border: 1px solid var(--edge);
  border-radius: 8px; overflow-x: auto; flex: 1; min-width: 0 }
.tiles { display: grid; gap: 12px; margin: 22px 0 0; padding: 0;
  grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)) }
.tile, .card, figure { background: var(--card); border: 1px solid var(--edge);
  border-radius: 12px }
.tile { padding: 12px 16px; border-top: 4px solid var(--plain-fill) }
.tile.compute { border-top-color: var(--compute-fill) }
.tile.prep { border-top-color: var(--prep-fill) }
.tile.fetch { border-top-color: var(--fetch-fill) }
.tile b { display: block; font-size: 1.7rem; line-height: 1.2; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums }
.tile span { color: var(--muted); font-size: 0.9rem }
.plots { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 430px), 1fr)) }
figure { margin: 0; padding: 16px 18px 10px; min-width: 0 }
figcaption p { color: var(--muted); font-size: 0.9rem; margin: 2px 0 8px }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 2px 16px; margin: 0 0 6px;
  padding: 0; font-size: 0.85rem; color: var(--muted) }
.legend li { display: flex; align-items: center; gap: 6px }
.legend i { width: 16px; height: 10px; border-radius: 2px; background: var(--plain-fill) }
.legend .compute { background: var(--compute-fill) }
.legend .prep { background: var(--prep-fill) }
.legend .fetch { background: var(--fetch-fill) }
.legend .speed { background: var(--ink); height: 3px }
.plot { display: block; width: 100%; height: auto; font-size: 13px; font-family: inherit;
  overflow: visible }
.remedies { list-style: none; margin: 0; padding: 0; display: grid; gap: 12px }
.remedy { padding: 14px 18px; display: grid; gap: 4px 20px; grid-template-columns: 6.2em 1fr }
.remedy > div { min-width: 0 }
.remedy .gain { font-size: 1.25rem; font-weight: 700; color: var(--accent);
  font-variant-numeric: tabular-nums; white-space: nowrap }
.remedy.best { border-color: var(--accent); border-width: 2px }
.remedy.best .gain { font-size: 1.9rem; line-height: 1.2 }
.remedy p { color: var(--muted); font-size: 0.95rem }
.code { display: flex; gap: 8px; align-items: start; margin: 6px 0 4px }
button { font: inherit; font-size: 0.85rem; color: var(--ink); background: var(--card);
  border: 1px solid var(--edge); border-radius: 8px; padding: 8px 12px; cursor: pointer }
button:hover { border-color: var(--accent) }
:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px }
.scroll { overflow-x: auto; padding: 4px 16px }
table { border-collapse: collapse; width: 100%; font-size: 0.93rem;
  font-variant-numeric: tabular-nums }
th { text-align: left; font-weight: 600; color: var(--muted); white-space: nowrap }
th, td { padding: 8px 14px 8px 0; border-bottom: 1px solid var(--edge) }
tr:last-child td { border-bottom: 0 }
td.number, th.number { text-align: right; white-space: nowrap }
td:last-child, th:last-child { padding-right: 0 }
.notes { margin: 0; padding-left: 1.2em }
footer { margin-top: 40px; color: var(--muted); font-size: 0.85rem }
@media (max-width: 560px) {
  main { padding: 18px 12px 40px }
  figure { padding: 14px 12px 8px }
  .plot { font-size: 15px }
  .remedy { grid-template-columns: 1fr; padding: 12px 14px }
  th, td { white-space: nowrap }
  .code { flex-direction: column; align-items: stretch }
}
@media print { .copy { display: none } figure, .card { break-inside: avoid } }
"""

SCRIPT = """
for (const button of document.querySelectorAll("button.copy")) {
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    try {
      await navigator.clipboard.writeText(code.textContent);
    } catch {
      const range = document.createRange();
      range.selectNodeContents(code);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      document.execCommand("copy");
    }
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}
"""
