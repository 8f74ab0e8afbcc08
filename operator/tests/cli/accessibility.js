// Faults of a page for people who read with a keyboard, a screen reader or weak eyes: a list of words.
() => {
  const faults = [];
  const fail = (what, element) => faults.push(`${what}: ${element.outerHTML.slice(0, 160)}`);
  const shown = (element) => element.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true });
  const text = (element) => (element.textContent || "").trim();
  const named = (element) => {
    const by = (element.getAttribute("aria-labelledby") || "").split(" ").filter(Boolean);
    return element.getAttribute("aria-label") || by.map((id) => text(document.getElementById(id))).join(" ") || text(element);
  };

  if (!document.documentElement.lang) faults.push("no language");
  if (!document.title) faults.push("no title");
  for (const [selector, count] of [["main", 1], ["h1", 1], ["body > header", 1], ["nav[aria-label]", 1]])
    if (document.querySelectorAll(selector).length !== count) faults.push(`not ${count} ${selector}`);
  const ids = [...document.querySelectorAll("[id]")].map((one) => one.id);
  if (new Set(ids).size !== ids.length) faults.push("an id is there twice");
  let level = 1;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    const now = Number(heading.tagName[1]);
    if (now > level + 1) fail("a level of headings is left out", heading);
    level = now;
  }
  for (const one of document.querySelectorAll("section, a, summary, [tabindex='0'], [role=img], [role=region]"))
    if (!named(one)) fail("no name", one);
  for (const one of document.querySelectorAll("th:not([scope])")) fail("a heading without a scope", one);
  for (const one of document.querySelectorAll("[tabindex]"))
    if (Number(one.tabIndex) > 0) fail("an order of its own", one);
  // Colour alone says nothing: what has a tone has words too.
  for (const one of document.querySelectorAll(".good, .busy, .bad, .quiet"))
    if (!/[\p{L}]/u.test(text(one)) && !/[\p{L}]/u.test(text(one.parentElement))) fail("only a colour", one);
  // What scrolls can be reached with a keyboard.
  for (const one of document.querySelectorAll("main *")) {
    const style = getComputedStyle(one);
    const scrolls = /auto|scroll/.test(style.overflowY + style.overflowX)
      && (one.scrollHeight > one.clientHeight + 1 || one.scrollWidth > one.clientWidth + 1);
    if (scrolls && one.tabIndex !== 0) fail("it scrolls, but not by keyboard", one);
  }

  const channels = (colour) => (colour.match(/[\d.]+/g) || []).map(Number);
  const light = (rgb) => {
    const [r, g, b] = rgb.slice(0, 3).map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (let one = element; one; one = one.parentElement) {
      const rgb = channels(getComputedStyle(one).backgroundColor);
      if (rgb.length && (rgb.length < 4 || rgb[3] === 1)) return rgb;
    }
    return [255, 255, 255];
  };
  let checked = 0;
  for (const one of document.querySelectorAll("body *")) {
    const own = [...one.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    if (!own || !shown(one) || one.closest(".vh, .skip, noscript")) continue;
    const style = getComputedStyle(one);
    const [a, b] = [light(channels(style.color)), light(behind(one))].sort((x, y) => y - x);
    const large = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && Number(style.fontWeight) >= 700);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < (large ? 3 : 4.5)) fail(`contrast ${contrast.toFixed(2)}`, one);
    checked += 1;
  }
  if (checked < 10) faults.push(`only ${checked} texts were looked at`);
  return faults;
};
