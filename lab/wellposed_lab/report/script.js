"use strict";
(() => {
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  // What only scripts read is packed into one compressed block: the plotting library, figures, folded tables.
  const packed = document.getElementById("packed");
  const unpack = async () => {
    const parts = packed ? JSON.parse(await inflate(packed)) : [];
    all("[data-packed]").forEach((place) => {
      const content = parts[place.dataset.packed];
      if (place.id === "library") {
        const script = document.createElement("script");
        script.textContent = content;
        document.head.append(script);
      } else if (place.tagName === "SCRIPT") place.textContent = content;
      else place.insertAdjacentHTML("beforeend", content);
    });
  };

  // Plots: drawn when they come near the window, coloured by the style sheet.
  const paint = (figure, wide) => {
    const text = colour("--text"), line = colour("--line");
    const axis = (known) => ({ ...known, gridcolor: line, linecolor: line, tickcolor: line, fixedrange: !wide });
    const layout = { ...figure.layout, font: { family: "system-ui, sans-serif", size: 12, color: text },
      hoverlabel: { bgcolor: colour("--panel"), bordercolor: line, font: { color: text } },
      xaxis: axis(figure.layout.xaxis), yaxis: axis(figure.layout.yaxis) };
    const data = figure.data.map((trace) => {
      const shade = colour(`--c${trace.meta.colour}`);
      if (trace.meta.band) return { ...trace, fillcolor: shade + "29" };
      const marker = { ...trace.marker, color: shade };
      const bars = trace.error_x && { ...trace.error_x, color: shade };
      return { ...trace, marker, line: { ...trace.line, color: shade }, ...(bars && { error_x: bars }) };
    });
    return [data, layout];
  };
  const draw = (panel) => {
    const place = panel.querySelector(".drawing");
    panel.figure ||= JSON.parse(panel.querySelector("script").textContent);
    const wide = matchMedia("(hover: hover)").matches;
    const [data, layout] = paint(panel.figure, wide);
    const settings = { responsive: true, displaylogo: false, displayModeBar: wide ? "hover" : false,
      modeBarButtonsToRemove: ["select2d", "lasso2d"] };
    Plotly.react(place, data, layout, settings);
    panel.drawn = true;
  };
  const panels = all(".panel");
  const redraw = () => panels.filter((panel) => panel.drawn).forEach(draw);
  const near = new IntersectionObserver((entries) => entries.filter((entry) => entry.isIntersecting).forEach((entry) => {
    near.unobserve(entry.target);
    draw(entry.target);
  }), { rootMargin: "600px" });
  unpack().then(() => {
    panels.forEach((panel) => near.observe(panel));
    all("details.folded table[data-sortable]").forEach(sortable);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

  all(".legend button").forEach((button) => button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", shown);
    all(".panel", button.closest("figure")).forEach((panel) => {
      panel.figure ||= JSON.parse(panel.querySelector("script").textContent);
      panel.figure.data.filter((trace) => trace.meta.model === button.dataset.model)
        .forEach((trace) => { trace.visible = shown; });
      if (panel.drawn) draw(panel);
    });
  }));

  // Claims: one filter for all tables, kept in the address as #filter:verdict=worse&paper=001&text=mlp.
  const form = document.getElementById("filter");
  const rows = all(".verdicts tbody tr");
  rows.forEach((row) => { row.words = row.textContent.toLowerCase(); });
  const wanted = () => Object.fromEntries(new FormData(form));
  const apply = () => {
    const { verdict, paper, text } = wanted();
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const fits = (row) => (!verdict || row.dataset.verdict === verdict) && (!paper || row.dataset.papers.split(" ").includes(paper))
      && words.every((word) => row.words.includes(word));
    rows.forEach((row) => { row.hidden = !fits(row); });
    all(".verdicts").forEach((table) => {
      const none = !all("tbody tr", table).some((row) => !row.hidden);
      table.parentElement.hidden = none;
      table.parentElement.nextElementSibling.hidden = !none;
    });
    all(".suite-claims").forEach((group) => {
      const count = group.querySelector(".count"), total = count.dataset.all;
      const left = all("tbody tr", group).filter((row) => !row.hidden).length;
      count.textContent = ` (${left < total ? left + " of " : ""}${total} claims)`;
    });
    const shown = rows.filter((row) => !row.hidden).length;
    form.querySelector("output").textContent = `${shown} of ${rows.length} claims`;
  };
  const remember = () => {
    const chosen = Object.entries(wanted()).filter(([, value]) => value);
    const text = chosen.length ? "#filter:" + new URLSearchParams(chosen) : "#results";
    try { history.replaceState(null, "", text); } catch { /* some browsers refuse it for files */ }
  };
  const recall = () => {
    if (!location.hash.startsWith("#filter:")) return;
    const chosen = new URLSearchParams(location.hash.slice("#filter:".length));
    ["verdict", "paper", "text"].forEach((name) => { form.elements[name].value = chosen.get(name) || ""; });
    apply();
    form.scrollIntoView();
  };
  form.hidden = false;
  form.addEventListener("input", () => { apply(); remember(); });
  form.addEventListener("reset", () => setTimeout(() => { apply(); remember(); }));
  form.addEventListener("submit", (event) => event.preventDefault());
  addEventListener("hashchange", recall);
  all("[data-filter]").forEach((link) => link.addEventListener("click", () => {
    form.reset();
    form.elements.verdict.value = link.dataset.filter;
    setTimeout(apply);
  }));
  apply();
  recall();

  // Tables: sorted by a click on a head; numbers stand before texts in either direction.
  const key = (row, column) => {
    const cell = row.cells[column], text = cell.dataset.sort ?? cell.textContent;
    const value = Number(text.replaceAll(",", ""));
    return text.trim() === "" || Number.isNaN(value) ? text : value;
  };
  const compare = (a, b, sign) => {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return sign * (typeof a === "number" ? Math.sign(a - b) || 0 : a.localeCompare(b));
  };
  const sortable = (table) => all("thead th", table).forEach((head) => head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    all("th", head.parentElement).forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    body.append(...[...body.rows].map((row) => [key(row, column), row])
      .sort(([a], [b]) => compare(a, b, down ? -1 : 1)).map(([, row]) => row));
  }));
  all("table[data-sortable]").filter((table) => !table.closest("details.folded")).forEach(sortable);

  // Paper: everything open, all plots drawn, light colours.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = all("details:not([open])");
    closed.forEach((one) => { one.open = true; });
    document.documentElement.dataset.theme = "light";
    panels.forEach(draw);
    panels.forEach((panel) => Plotly.relayout(panel.querySelector(".drawing"), { width: 330, autosize: false }));
  });
  addEventListener("afterprint", () => {
    closed.forEach((one) => { one.open = false; });
    delete document.documentElement.dataset.theme;
    panels.forEach((panel) => Plotly.relayout(panel.querySelector(".drawing"), { width: null, autosize: true }));
    redraw();
  });
})();
