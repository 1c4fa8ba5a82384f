"""How the page looks, by day and by night."""

from __future__ import annotations

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fbfaf7; --card: #ffffff; --ink: #1d2327; --soft: #5c666d; --rule: #e3e0d8; --accent: #22577a;
  --good: #2f855a; --bad: #b4483c; --some: #7a8fa3; --band: #22577a33; --code: #f3f1eb;
  --add: #e2f2e6; --add-ink: #1d5c37; --cut: #fae5e1; --cut-ink: #8a2f24;
  --fork: #b08a3c; --thinking: #4f6fae; --commands: #6aa0a8; --carry: #a06a9b; --calibrate: #c7a9a0;
  --grade: #c9744c; --clean_up: #8a8f6a; --other: #b9b6ad;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #15191c; --card: #1d2326; --ink: #e6e8e6; --soft: #9aa5ab; --rule: #31393d; --accent: #7fb3d5;
    --good: #6cbf8f; --bad: #e58a7b; --some: #8fa2b3; --band: #7fb3d544; --code: #14181a;
    --add: #17301f; --add-ink: #a4dcb7; --cut: #3a1f1b; --cut-ink: #f0b3a8;
    --fork: #d0ab5e; --thinking: #7f9bd6; --commands: #86bcc4; --carry: #bf8fba; --calibrate: #a5847b;
    --grade: #dc9470; --clean_up: #a8ad86; --other: #6c706f;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", "Helvetica Neue", sans-serif; }
main { max-width: 1060px; margin: 0 auto; padding: 32px 20px 80px; }
header h1 { font-size: 27px; line-height: 1.2; margin: 0 0 4px; letter-spacing: -0.01em; }
header p { margin: 0; color: var(--soft); overflow-wrap: anywhere; }
nav { margin: 14px 0 0; display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 14px; }
a { color: var(--accent); text-decoration-thickness: 1px; text-underline-offset: 2px; }
h2 { font-size: 18px; margin: 40px 0 4px; }
h3 { font-size: 15px; margin: 18px 0 6px; }
.lead { color: var(--soft); margin: 0 0 12px; max-width: 74ch; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 22px 0 0; }
.tile { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 12px 14px; }
.tile b { display: block; font-size: 25px; font-weight: 600; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile span { color: var(--soft); font-size: 13px; display: block; }
.tile .name { color: var(--ink); font-size: 13px; }
.card { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 14px 16px;
  margin: 0 0 14px; }
.two { display: grid; grid-template-columns: repeat(auto-fit, minmax(330px, 1fr)); gap: 14px; }
.two { margin: 0 0 14px; } .two > .card { margin: 0; }
.card > h3:first-child { margin-top: 0; }
.wide { overflow-x: auto; }
svg { display: block; }
.chart { width: 100%; height: auto; overflow: visible; }
.chart text { fill: var(--soft); font-size: 12px; font-family: inherit; }
.chart .side { text-anchor: end; }
.chart .below, .chart .value { text-anchor: middle; }
.chart .value { fill: var(--ink); }
.grid { stroke: var(--rule); } .axis { stroke: var(--soft); stroke-width: 1; }
.dots { fill: var(--accent); fill-opacity: 0.45; } .knots circle { fill: var(--accent); }
.line { fill: none; stroke: var(--accent); stroke-width: 2; stroke-linejoin: round; }
rect.good { fill: var(--good); } rect.bad { fill: var(--bad); } rect.some { fill: var(--some); }
.stack { width: 100%; height: 30px; border-radius: 6px; } .stack.thin { height: 9px; border-radius: 4px;
  min-width: 120px; }
.s-fork { fill: var(--fork); } .s-thinking { fill: var(--thinking); } .s-commands { fill: var(--commands); }
.s-carry { fill: var(--carry); } .s-calibrate { fill: var(--calibrate); } .s-grade { fill: var(--grade); }
.s-clean_up { fill: var(--clean_up); } .s-other { fill: var(--other); }
.legend { list-style: none; margin: 10px 0 0; padding: 0; display: flex; flex-wrap: wrap; gap: 4px 18px;
  font-size: 13px;
  color: var(--soft); }
.legend svg { display: inline-block; width: 10px; height: 10px; margin-right: 6px; border-radius: 2px; }
.legend b { color: var(--ink); font-weight: 600; font-variant-numeric: tabular-nums; }
.strip { width: 220px; height: 20px; margin-left: 12px; } th.rewards { padding-left: 14px; }
.strip .ticks { stroke: var(--ink); stroke-opacity: 0.65; stroke-width: 1.2; }
.strip .mean { fill: var(--accent); stroke: var(--card); stroke-width: 1.5; } .strip .band { fill: var(--band); }
.strip .axis { stroke: var(--rule); }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
thead th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px;
  border-bottom: 1px solid var(--rule);
  padding: 4px 10px 6px 0; vertical-align: bottom; }
tbody td, tbody th { padding: 5px 10px 5px 0; border-bottom: 1px solid var(--rule); text-align: left;
  vertical-align: top;
  font-weight: 400; overflow-wrap: anywhere; }
tbody tr:last-child > * { border-bottom: 0; }
tbody td:first-child { min-width: 9em; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
thead .number { padding-right: 10px; text-align: right; }
.bars td, .bars th { border: 0; padding: 3px 10px 3px 0; white-space: nowrap; } .bars th { width: 1%; }
.bars .bar { width: 99%; } .bars svg { width: 100%; height: 12px; } .bars .number { width: 1%; }
details { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; margin: 0 0 8px; }
details details { border-radius: 8px; margin: 8px 0; background: var(--ground); }
summary { cursor: pointer; padding: 8px 14px; display: flex; flex-wrap: wrap; gap: 2px 14px; align-items: baseline; }
summary::before { content: "▸"; color: var(--soft); } details[open] > summary::before { content: "▾"; }
summary::-webkit-details-marker { display: none; }
summary b { font-weight: 600; overflow-wrap: anywhere; }
.inside { padding: 2px 14px 12px; }
:target { outline: 2px solid var(--accent); outline-offset: 2px; }
.mark { font-size: 12.5px; border-radius: 20px; padding: 0 9px; border: 1px solid var(--rule); color: var(--soft);
  white-space: nowrap; }
.mark.good { color: var(--good); border-color: currentColor; } .mark.bad { color: var(--bad);
  border-color: currentColor; }
.soft, .empty { color: var(--soft); } .empty { margin: 6px 0; font-style: italic; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 14px; margin: 4px 0 10px; font-size: 13.5px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
pre { background: var(--code); border: 1px solid var(--rule); border-radius: 8px; padding: 9px 12px; margin: 6px 0;
  font: 12.5px/1.5 ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-x: auto; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 360px; overflow-y: auto; }
code { font: 12.5px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
pre .add { background: var(--add); color: var(--add-ink); display: block; }
pre .cut { background: var(--cut); color: var(--cut-ink); display: block; }
pre .place { color: var(--accent); display: block; } pre .same { display: block; }
ol.steps { list-style: none; margin: 6px 0; padding: 0; border-left: 2px solid var(--rule); }
ol.steps > li { padding: 4px 0 6px 14px; }
ol.steps .when { color: var(--soft); font-size: 12.5px; }
footer { color: var(--soft); font-size: 13px; margin-top: 40px; }
@media print { details > *:not(summary) { display: block; } nav { display: none; } }
"""
