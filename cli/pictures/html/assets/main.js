// Puts the page together: controls, navigation and the registered sections.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  TP.data = data;
  const main = document.getElementById("content");
  const nav = document.getElementById("nav");
  const controls = document.getElementById("controls");
  const view = { data, plans: data.plans || [], runs: data.runs || [], plan: (data.plans || [])[0] || null };

  // What sticks below the header has to know how tall it is.
  const header = document.querySelector("header.top");
  new ResizeObserver(() => document.documentElement.style.setProperty("--header", `${header.offsetHeight}px`)).observe(header);

  const build = () => {
    for (const tip of document.querySelectorAll(".tip")) tip.remove();
    main.replaceChildren();
    nav.replaceChildren();
    const shown = TP.sections.filter((section) => !section.when || section.when(view));
    shown.sort((a, b) => (a.order || 0) - (b.order || 0));
    for (const section of shown) {
      const id = `${section.name}-title`;
      const host = TP.el("section", { id: section.name, "aria-labelledby": id },
        TP.el("h2", { id }, section.title));
      main.append(host);
      nav.append(TP.el("a", { href: `#${section.name}` }, section.short || section.title));
      section.build(host, view);
    }
  };

  controls.append(TP.themeToggle());
  if (view.plans.length > 1) {
    const select = TP.el("select", { "aria-label": "Plan shown" },
      view.plans.map((plan, k) => TP.el("option", { value: k }, plan.name)));
    select.addEventListener("change", () => { view.plan = view.plans[Number(select.value)]; build(); });
    controls.prepend(select);
  }
  build();
  const version = data.made_by && data.made_by.timeprest;
  document.getElementById("footer").append(
    `Made by TiMePReSt${version ? ` ${version}` : ""}. This page is complete in itself: it loads nothing and sends nothing.`);
  document.documentElement.dataset.ready = "1";
})();
