// Pieces of the page that both its lists are made of. Text is set as text, never as markup.

export function element(kind, className, text) {
  const made = document.createElement(kind);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

export function decisionRow(each) {
  const row = element("li"), cells = element("span", "cells");
  each.survivals.forEach((survival, k) => {
    const kind = k < each.num_accepted ? "accepted" : k < each.num_scheduled ? "rejected" : "trimmed";
    cells.append(element("span", `cell ${kind}`, each.has_block === false ? "–" : (survival * 100).toFixed(0)));
  });
  row.append(cells, element("span", "length", `length ${each.num_scheduled}, accepted ${each.num_accepted}`));
  row.append(element("span", "why", each.why));
  row.append(element("span", "where", `${each.rank} step ${each.step} ${(each.request_id ?? "").slice(-6)}`));
  return row;
}
