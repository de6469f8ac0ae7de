"""The style sheet of the pages: light and dark, wide and narrow."""

STYLE = """
:root { color-scheme: light dark; --page: #fff; --text: #1c1e21; --quiet: #5b6168; --line: #d9dde2;
  --panel: #f5f6f8; --c0: #1f5fd0; --c1: #c2410c; --c2: #15803d; --c3: #6b7280; }
@media (prefers-color-scheme: dark) { :root { --page: #15181c; --text: #e6e8eb; --quiet: #a3abb5;
  --line: #363c44; --panel: #1e2329; --c0: #7fb0ff; --c1: #ff9d5c; --c2: #5fd38a; --c3: #aab2bd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 62rem; background: var(--page);
  color: var(--text); font: 16px/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { margin: .5rem 0; max-width: 44rem; }
.quiet, figcaption { color: var(--quiet); font-size: .9rem; }
.finding { background: var(--panel); border-left: 4px solid var(--c0); padding: .5rem 1rem; margin: 1.2rem 0;
  border-radius: 4px; }
.finding p { max-width: none; } sup { line-height: 0; }
.figures { display: grid; gap: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--text); text-anchor: middle; }
.grid { stroke: var(--line); } .axis { stroke: var(--quiet); }
.line { fill: none; stroke-width: 2; } .band { opacity: .16; } .dot { stroke: none; }
.line.s0 { stroke: var(--c0); } .line.s1 { stroke: var(--c1); stroke-dasharray: 7 4; }
.line.s2 { stroke: var(--c2); stroke-dasharray: 2 3; }
.line.s3 { stroke: var(--c3); stroke-dasharray: 9 3 2 3; }
.band.s0, .dot.s0, .bar.s0 { fill: var(--c0); } .band.s1, .dot.s1, .bar.s1 { fill: var(--c1); }
.band.s2, .dot.s2 { fill: var(--c2); } .band.s3, .dot.s3 { fill: var(--c3); }
table { border-collapse: collapse; width: 100%; font-size: .88rem; font-variant-numeric: tabular-nums; }
th, td { padding: .45rem .5rem; text-align: right; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th, td { white-space: nowrap; }
th:first-child { text-align: left; } td small { display: block; color: var(--quiet); }
pre { background: var(--panel); padding: .8rem 1rem; border-radius: 4px; margin: .5rem 0;
  white-space: pre-wrap; }
ul { padding-left: 1.2rem; }
@media (max-width: 46rem) {
  thead { display: none; } table, tbody { display: block; }
  tr { display: grid; grid-template-columns: repeat(3, 1fr); border: 1px solid var(--line);
    border-radius: 6px; padding: .5rem; margin-bottom: .8rem; }
  tr th { grid-column: 1 / -1; text-align: left; }
  th, td { border: 0; padding: .25rem .4rem; text-align: left; }
  td::before { content: attr(data-label); display: block; color: var(--quiet); font-size: .78rem; }
}
"""
