"use strict";
(() => {
  const root = document.documentElement;

  // The picture names colours of the style sheet, so that it follows light, dark and paper.
  const coloured = (value, style, key) => {
    if (Array.isArray(value)) return value.map((item) => coloured(item, style, ""));
    if (value && typeof value === "object") {
      return Object.fromEntries(
        Object.entries(value).map(([name, item]) => [name, coloured(item, style, name)]),
      );
    }
    const named = key.endsWith("color") && typeof value === "string" && value[0] === "@";
    return named ? style.getPropertyValue(`--${value.slice(1)}`).trim() : value;
  };

  const plot = document.getElementById("plot");
  const source = document.getElementById("figure");
  if (plot && source && window.Plotly) {
    const figure = JSON.parse(source.textContent);
    const config = {
      displaylogo: false,
      showLink: false,
      responsive: true,
      modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
      toImageButtonOptions: { filename: "autotune-pareto", scale: 2 },
    };
    const draw = () => {
      const { data, layout } = coloured(figure, getComputedStyle(root), "");
      if (plot.clientWidth < 500) {
        layout.font.size = 11;
        layout.legend.font = { size: 11 };
      }
      return window.Plotly.react(plot, data, layout, config);
    };
    draw().then(() => {
      plot.on("plotly_click", (event) => {
        const row = document.getElementById(`trial-${event.points[0].customdata}`);
        if (!row) return;
        document.querySelectorAll(".found").forEach((item) => item.classList.remove("found"));
        row.hidden = false;
        row.classList.add("found");
        row.scrollIntoView({ block: "center" });
      });
    });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    addEventListener("beforeprint", () => { root.dataset.print = ""; draw(); });
    addEventListener("afterprint", () => { delete root.dataset.print; draw(); });
  }
  addEventListener("beforeprint", () => {
    document.querySelectorAll("details").forEach((item) => { item.open = true; });
  });

  // A link to a configuration opens it.
  const reveal = () => {
    const target = location.hash && document.getElementById(location.hash.slice(1));
    if (target && target.tagName === "DETAILS") target.open = true;
  };
  addEventListener("hashchange", reveal);
  reveal();

  const selectText = (element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
  };
  const copy = async (pre) => {
    try {
      await navigator.clipboard.writeText(pre.textContent);
      return "copied";
    } catch {
      selectText(pre);
      return document.execCommand("copy") ? "copied" : "selected: press Ctrl+C";
    }
  };
  document.querySelectorAll(".code").forEach((box) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = "copy";
    button.addEventListener("click", async () => {
      button.textContent = await copy(box.querySelector("pre"));
      setTimeout(() => { button.textContent = "copy"; }, 2500);
    });
    box.prepend(button);
  });

  const table = document.getElementById("table");
  if (!table) return;
  // One body per trial: its figures, and below them its settings.
  const rows = () => [...table.tBodies];
  const sort = (header, column) => {
    const up = header.getAttribute("aria-sort") === "descending"
      || (!header.hasAttribute("aria-sort") && header.dataset.sort === "text");
    const key = (row) => {
      const cell = row.rows[0].cells[column];
      if (header.dataset.sort === "text") return cell.textContent.trim();
      return cell.dataset.value === undefined ? null : Number(cell.dataset.value);
    };
    const order = (a, b) => {
      const [first, second] = [key(a), key(b)];
      // What is not known comes last, whichever way.
      if (first === null || second === null) return (first === null) - (second === null);
      const sign = first < second ? -1 : first > second ? 1 : 0;
      return up ? sign : -sign;
    };
    table.append(...rows().sort(order));
    table.querySelectorAll("[aria-sort]").forEach((item) => item.removeAttribute("aria-sort"));
    header.setAttribute("aria-sort", up ? "ascending" : "descending");
  };
  [...table.tHead.rows[0].cells].forEach((header, column) => {
    if (!header.dataset.sort) return;
    const button = document.createElement("button");
    button.type = "button";
    button.append(...header.childNodes);
    button.addEventListener("click", () => sort(header, column));
    header.append(button);
  });

  const filter = document.getElementById("filter");
  filter.addEventListener("change", () => {
    rows().forEach((row) => {
      const inSet = filter.value === "=set" && "set" in row.dataset;
      row.hidden = filter.value !== "" && !inSet && row.dataset.outcome !== filter.value;
    });
    const shown = rows().filter((row) => !row.hidden).length;
    document.getElementById("shown").textContent = `${shown} of ${rows().length} shown`;
  });
  document.getElementById("tools").hidden = false;
})();
