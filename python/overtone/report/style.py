"""The page's style: light and dark, from a phone to a wide screen. Figures use its colours."""

STYLE = """\
:root {
  --paper: #fbfbfa; --card: #ffffff; --ink: #1d2330; --muted: #5c6475; --grid: #dfe3ea;
  --smooth: #c2410c; --sharpen: #1d4ed8; --undecided: #8a90a0; --third: #0f766e; --fourth: #9333ea;
  --shadow: rgb(29 35 48 / .28);
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12151b; --card: #1a1e26; --ink: #e8eaf0; --muted: #a5adbd; --grid: #343a47;
    --smooth: #fb923c; --sharpen: #82a8ff; --undecided: #8a90a0; --third: #4fd1c0; --fourth: #c79bff;
    --shadow: rgb(0 0 0 / .75);
  }
}
* { box-sizing: border-box; }
html { scroll-behavior: smooth; }
@media (prefers-reduced-motion: reduce) { html { scroll-behavior: auto; } }
body {
  margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 72rem;
  background: var(--paper); color: var(--ink); font: 1rem/1.6 var(--sans);
}
.brand { margin: 0; color: var(--muted); letter-spacing: .14em; text-transform: uppercase; font-size: .75rem; }
h1 { margin: .2rem 0 .6rem; font-size: clamp(1.6rem, 5vw, 2.4rem); line-height: 1.15; overflow-wrap: anywhere; }
h2 { margin: 0 0 .6rem; font-size: 1.35rem; }
.lead { max-width: 46rem; font-size: 1.15rem; margin: 0 0 1.2rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: .8rem; margin: 0 0 1.5rem; }
.facts div { display: flex; flex-direction: column-reverse; justify-content: flex-end; padding: .8rem 1rem;
  background: var(--card); border: 1px solid var(--grid); border-radius: .6rem; }
.facts dt { color: var(--muted); font-size: .85rem; line-height: 1.35; }
.facts dd { margin: 0; font-size: 1.4rem; white-space: nowrap; font-weight: 650; font-variant-numeric: tabular-nums; }
nav ul { display: flex; flex-wrap: wrap; gap: .3rem 1.2rem; padding: .6rem 0; margin: 0 0 2rem; list-style: none;
  border-block: 1px solid var(--grid); }
a { color: var(--sharpen); }
section { margin-bottom: 3rem; }
section > p { max-width: 46rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); gap: 1rem;
  margin: 1rem 0; align-items: start; }
figure { margin: 0; padding: .8rem; background: var(--card); border: 1px solid var(--grid); border-radius: .6rem; }
figure svg { display: block; width: 100%; height: auto; }
figure svg text { font-family: var(--sans) !important; }
figcaption { margin-top: .5rem; color: var(--muted); font-size: .9rem; line-height: 1.45; }
/* A shadow at the edge behind which a table goes on: the card covers it where the table ends. */
.scroll { overflow-x: auto; margin: 1rem 0; border: 1px solid var(--grid); border-radius: .6rem;
  background:
    linear-gradient(to left, var(--card) 30%, transparent) right / 4rem 100% no-repeat local,
    linear-gradient(to left, var(--shadow), transparent) right / 1.2rem 100% no-repeat scroll,
    var(--card); }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-size: .9rem;
  font-variant-numeric: tabular-nums; }
/* Both stay where they are while the columns pass by. */
caption { padding: .7rem 0; text-align: left; font-weight: 600; }
caption span { position: sticky; left: .8rem; display: inline-block; margin-inline: .8rem;
  max-width: min(66rem, 100vw - 5rem); white-space: normal; }
tbody th, thead th:first-child { position: sticky; left: 0; background: var(--card);
  border-right: 1px solid var(--grid); }
th, td { padding: .3rem .8rem; white-space: nowrap; border-top: 1px solid var(--grid); text-align: right; }
thead th { white-space: normal; vertical-align: bottom; }
tbody th { white-space: normal; min-width: 6rem; max-width: 11rem; }
th[scope="row"], th:first-child, th.text, td.text { text-align: left; }
td.long { white-space: normal; min-width: 14rem; }
th { font-weight: 600; }
thead th { color: var(--muted); }
.note { color: var(--muted); font-size: .9rem; }
details { margin: 1rem 0; }
summary { cursor: pointer; color: var(--sharpen); }
:focus-visible { outline: 2px solid var(--sharpen); outline-offset: 2px; }
footer { margin-top: 4rem; padding-top: 1rem; border-top: 1px solid var(--grid); color: var(--muted);
  font-size: .9rem; }
@media print { nav { display: none; } figure, .scroll { break-inside: avoid; } }
"""
